"""Restrict what configuration files may do: set plain values, name harmless classes, and use nearby paths.

A config.yaml travels with a run, so anyone may have written it. Naming a class imports its module, which runs its code.
A path can be written to, downloaded from, or cleared. The rules:

- The command line is trusted. Files may name the classes and paths that its flags name.
- Files (`--config`, `--recipe PATH`, the config.yaml beside a checkpoint) may name only the classes in `SAFE` and
  `SAFE_PACKAGES`. Exceptions: `--trust`, and a file identical to a config.yaml written by a run of this user.
  jsonargparse asks before each import. A file named inside an untrusted file is not read.
- The import paths of your own nets, optimizers, schedules and data sets follow the same rule.
- `config_file.check_choices` restricts paths and other choices, after the parser has merged all files and flags.
- YAML tags (`!!python/…`) and files that are too large, too deep or grow through aliases are refused even with
  `--trust`.

Files may set all other values (seed, epochs, intervals, precision, …).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import yaml
from jsonargparse import set_parsing_settings

from cifar_lit.cli.errors import UNTRUSTED
from cifar_lit.cli.flags import LOGS, RECIPES, Command, recipe_path
from cifar_lit.errors import UsageError
from cifar_lit.plugins import allow_imports, import_module_of, is_import_path
from cifar_lit.runs.config_file import PLACES, allow_choices, leaves, read_settings, unsafe_choices

# Classes of Lightning that take plain values only, run no command and do not use the network.
SAFE = {
    "callbacks": (
        "DeviceStatsMonitor", "EMAWeightAveraging", "EarlyStopping", "GradientAccumulationScheduler",
        "LearningRateMonitor", "ModelCheckpoint", "ModelSummary", "RichModelSummary", "RichProgressBar",
        "TQDMProgressBar", "Timer",
    ),
    "loggers": ("CSVLogger", "TensorBoardLogger"),
    "profilers": ("AdvancedProfiler", "PassThroughProfiler", "SimpleProfiler"),
    "strategies": ("DDPStrategy", "FSDPStrategy", "SingleDeviceStrategy"),
    "plugins.environments": ("LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
}  # fmt: skip
SAFE_PACKAGES = {"torchmetrics.classification", "cifar_lit.features"}  # all of their classes
# Settings that name a class, at any depth.
CLASSES = {
    *(("trainer", name) for name in ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")),
    *(("model", name) for name in ("metrics", "net", "net_options", "optimizer", "schedule")),
    *(("data", name) for name in ("dataset", "augment", "split")),
}
OWN = ("net", "optimizer", "schedule", "dataset")  # imported by our registries
_PLAIN_NAME = re.compile(r"[\w-]+|timm/[\w.-]+")  # names in the package, torchvision or timm

_allowed_before: set[str] = set()


def guard(command: Command, base: Path | None) -> None:
    """Check the configuration files of a command and allow the names in trusted files; raise UsageError for others."""
    files = [("", Path(config).expanduser()) for config in command.configs]
    if base is not None and base.parent != RECIPES:
        files.insert(0, ("", base))
    for part in ("trainer", "model", "data"):
        files += [(part, Path(value)) for value in command.values(part) if Path(value).is_file()]
    typed = _typed(command)
    trusted: list[object] = [typed]
    for group, file in files:
        text, settings = read_settings(file)
        if group:
            settings = {group: settings}
        if command.trust or _mark(text).is_file():
            trusted.append(settings)
            continue
        for name in sorted(_own_names(settings) - _own_names(typed)):
            raise UsageError(UNTRUSTED.format(name))
        for further in further_files(settings, file.parent):
            line = f"a configuration file refers to settings in {further[:200]!r}, which is not read"
            raise UsageError(f"{line}: name it with --config, or give --trust if you trust the file")
    allow(trusted)


def further_files(settings: object, folder: Path) -> Iterator[str]:
    """Yield the files named in the settings of a file in `folder` that the parser would read."""
    for key, text in leaves(settings):
        if key == ("config",) or (key[:2] in CLASSES and key[1] not in (*OWN, "net_options")):
            for path in (Path(text), folder / text):
                with suppress(OSError):  # text too long for a path
                    if path.exists() and not path.is_dir():
                        yield text


def _typed(command: Command) -> list[dict[str, object]]:
    """Return the settings given by flags, as text and as the parser reads them."""
    settings: list[dict[str, object]] = [{"logs": command.logs or LOGS}]
    if command.recipe:
        settings.append({"recipe": recipe_path(command.recipe).stem})
    for word in command.flags:
        name, _, value = word.removeprefix("--").partition("=")
        settings.append({name: value})
        with suppress(yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError):  # invalid YAML
            settings.append({name: yaml.safe_load(value)})
    return settings


def allow_run(config: Path, trusted: bool) -> None:
    """Let a config.yaml name nets, data sets and paths if `trusted`, or if a run of this user wrote it."""
    text, settings = read_settings(config)
    if trusted or _mark(text).is_file():
        allow_imports(_own_names(settings))
        allow_choices(settings)


def _own_names(settings: object) -> set[str]:
    """Return the import paths of your own nets, optimizers, schedules and data sets in nested settings."""
    return {text for key, text in leaves(settings) if key and key[-1] in OWN and not _PLAIN_NAME.fullmatch(text)}


def remember(text: str) -> None:
    """Record that a run of this user writes `text` to its config.yaml, if an untrusted file must not contain it."""
    settings = yaml.safe_load(text)
    if "class_path" in text or _own_names(settings) or any(unsafe_choices(settings)):
        with suppress(OSError):  # no writable home folder: the run will need --trust
            _mark(text).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _mark(text).touch()


def _mark(text: str) -> Path:
    """Return the file that marks a configuration as this user's. Other users may write to $CIFAR_LIT_CACHE."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (Path.expanduser can raise)
    return Path("/", cache) / "cifar-lit" / "own-configurations" / sha256(text.encode()).hexdigest()


def allow(settings: object) -> None:
    """Allow the classes in `SAFE` and in `settings` in files. Parsers of this process import no other classes."""
    safe: set[str] = set()
    for group, names in SAFE.items():
        safe.update(*(_paths(group, name) for name in names))
    named = [(key, path) for key, path in class_names(settings) if path.partition(".")[0] != "jsonargparse"]
    paths = {path for _, path in named}
    set_parsing_settings(import_path_denylist=["*", *sorted(_allowed_before)])
    set_parsing_settings(import_path_allowlist=sorted(safe | paths | SAFE_PACKAGES))
    allow_imports(paths)
    allow_choices(settings)
    _allowed_before.update(paths - safe)
    for key, path in named:  # imported here, because the parser does not search the working folder
        is_class = key[-1] == "class_path" or key in CLASSES or key[1:-1] == ("metrics",)
        if is_class and key[-1] not in OWN and path not in safe:
            with suppress(UsageError):  # the parser reports it
                import_module_of(path)


def class_names(settings: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys and import paths of classes in nested settings. Lightning's classes may be plain names."""
    for key, text in leaves(settings):
        if key[:2] not in CLASSES or key[-1] in PLACES:
            continue
        if text.isidentifier():
            for group in SAFE:
                yield from ((key, path) for path in _paths(group.partition(".")[0], text))
        elif is_import_path(text) and not Path(text).is_file():  # the parser reads a file of this name
            yield key, text


def _paths(group: str, name: str) -> set[str]:
    """Return the public and the full import path of Lightning's class `name`, an empty set if there is none."""
    value = getattr(import_module(f"lightning.pytorch.{group}"), name, None)
    if not isinstance(value, type):
        return set()
    return {f"lightning.pytorch.{group}.{name}", f"{value.__module__}.{name}"}
