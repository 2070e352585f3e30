"""What a configuration file may do: set plain values, name classes that are known to be harmless, and places that are near.

A config.yaml travels with a run, so it may come from anyone. Naming a class imports its module, which runs its code; naming a
place has it written to, fetched from, or cleared. Therefore

- what is typed on the command line is trusted: classes and places that its flags name may be named by files too;
- of every file (`--config`, `--recipe PATH`, the config.yaml beside a checkpoint) only the classes in `SAFE` and those of
  `SAFE_PACKAGE` are taken, unless `--trust` is given, or the file is word for word a config.yaml that a run of this user wrote.
  jsonargparse asks before each import; files that such a file points to are not read;
- so it is with nets, optimizers and data sets of one's own, whose names are paths to import and no plain words;
- what else it may choose says `config_file.check_choices`, which looks at what the parser has made of all files and flags;
- tags of YAML (`!!python/…`), files too large, too deep, or growing by aliases are refused, with `--trust` too.

All other numbers and choices (seed, epochs, intervals, precision, …) are a file's to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import set_parsing_settings

from cifar_lit.cli.errors import UNTRUSTED
from cifar_lit.cli.flags import LOGS, RECIPES, Command, recipe_path
from cifar_lit.errors import UsageError
from cifar_lit.plugins import allow_imports, import_module_of, is_import_path
from cifar_lit.runs.config_file import PLACES, allow_choices, leaves, plain_text, plain_values, unsafe_choices

# Classes of Lightning's that take plain values only, run no command and send nothing over the network.
SAFE = {
    "callbacks": (
        "DeviceStatsMonitor", "EMAWeightAveraging", "EarlyStopping", "GradientAccumulationScheduler", "LearningRateMonitor",
        "ModelCheckpoint", "ModelSummary", "RichModelSummary", "RichProgressBar", "TQDMProgressBar", "Timer",
    ),
    "loggers": ("CSVLogger", "TensorBoardLogger"),
    "profilers": ("AdvancedProfiler", "PassThroughProfiler", "SimpleProfiler"),
    "strategies": ("DDPStrategy", "FSDPStrategy", "SingleDeviceStrategy"),
    "plugins.environments": ("LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
}  # fmt: skip
SAFE_PACKAGE = "torchmetrics.classification"  # all in it; jsonargparse asks for where a class is defined, too
# Settings in which, or below which, a class can be named.
CLASSES = {
    *(("trainer", name) for name in ("accelerator", "callbacks", "logger", "plugins", "profiler", "strategy")),
    *(("model", name) for name in ("metrics", "net", "net_options", "optimizer")),
    ("data", "dataset"),
}
OWN = ("net", "optimizer", "dataset")  # that our registries import
_PLAIN_NAME = re.compile(r"[\w-]+|timm/[\w.-]+")  # of what comes with the package, torchvision or timm

_allowed_before: set[str] = set()


def guard(command: Command, base: Path | None) -> None:
    """Checks every file that a command takes settings from, and sets what files may name from now on.

    base: the weakest settings, as for `arguments`. Raises UsageError for a file that is refused.
    """
    files = [("", base)] if base is not None and base.parent != RECIPES else []
    files += [("", Path(config).expanduser()) for config in command.configs]
    for part in ("trainer", "model", "data"):
        files += [(part, Path(value)) for value in command.values(part) if Path(value).is_file()]
    trusted = typed = _typed(command)
    for group, file in files:
        settings = {group: plain_values(file)} if group else plain_values(file)
        if command.trust or _mark(plain_text(file)).is_file():
            trusted = [*trusted, settings]
        elif untrusted := sorted(_own_names(settings) - _own_names(typed)):
            raise UsageError(UNTRUSTED.format(untrusted[0]))
        elif further := next(_further_files(settings, file.parent), None):
            line = f"a configuration file has settings in {further[:200]!r}, which is not read"
            raise UsageError(f"{line}: name it with --config, or give --trust if you know where the file comes from")
    allow(trusted)


def _further_files(settings: Any, folder: Path) -> Iterator[str]:
    """What a file in `folder` points to that the parser would read, whatever its size and kind."""
    for key, text in leaves(settings):
        if key == ("config",) or (key[:2] in CLASSES and key[1] not in (*OWN, "net_options")):
            with suppress(OSError):  # a text that is too long for a path
                yield from (text for path in (Path(text), folder / text) if path.exists() and not path.is_dir())


def _typed(command: Command) -> list[dict[str, Any]]:
    """The settings that a line's flags say."""
    settings: list[dict[str, Any]] = [{"logs": command.logs or LOGS}]
    if command.recipe:
        settings.append({"recipe": recipe_path(command.recipe).stem})
    for word in command.flags:
        name, _, value = word.removeprefix("--").partition("=")
        settings.append({name: value})
        with suppress(yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError):  # a text that is no YAML
            settings.append({name: yaml.safe_load(value)})
    return settings


def allow_run(config: Path, trusted: bool) -> None:
    """Lets a run's config.yaml name nets, data sets and places, if the user trusts it, or a run of this user wrote it."""
    if trusted or _mark(plain_text(config)).is_file():
        settings = plain_values(config)
        allow_imports(_own_names(settings))
        allow_choices(settings)


def _own_names(settings: Any) -> set[str]:
    """Nets, optimizers and data sets of one's own in nested settings."""
    return {text for key, text in leaves(settings) if key and key[-1] in OWN and not _PLAIN_NAME.fullmatch(text)}


def remember(text: str) -> None:
    """Notes that a run of this user writes `text` to its config.yaml, where it names what files may not name."""
    settings = yaml.safe_load(text)
    if "class_path" in text or _own_names(settings) or any(unsafe_choices(settings)):
        with suppress(OSError):  # no home, or one that cannot be written: --trust will be asked for
            _mark(text).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _mark(text).touch()


def _mark(text: str) -> Path:
    """Where a configuration is noted: in the user's own cache, and not in $CIFAR_LIT_CACHE, which others may have filled."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path("/", cache) / "cifar-lit" / "own-configurations" / sha256(text.encode()).hexdigest()


def allow(settings: Any) -> None:
    """Lets files name the classes in `SAFE` and choose what `settings` do; parsers of this process import no other classes."""
    known = {path for group, names in SAFE.items() for name in names for path in _paths(group, name)}
    named = [(key, path) for key, path in class_names(settings) if path.partition(".")[0] != "jsonargparse"]
    paths = {path for _, path in named}
    set_parsing_settings(import_path_denylist=["*", *sorted(_allowed_before)])
    set_parsing_settings(import_path_allowlist=sorted(known | paths | {SAFE_PACKAGE}))
    allow_imports(paths)
    allow_choices(settings)
    _allowed_before.update(paths - known)
    for key, path in named:  # those that the parser is to import, which does not look in the working folder
        is_class = key[-1] == "class_path" or key in CLASSES or key[1:-1] == ("metrics",)
        if is_class and key[-1] not in OWN and path not in known:
            with suppress(UsageError):  # the parser says it
                import_module_of(path)


def class_names(settings: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Import paths in nested settings, with the names that lead to each; of a class of Lightning's the name is enough."""
    for key, text in leaves(settings):
        if key[:2] not in CLASSES or key[-1] in PLACES:
            continue
        if is_import_path(text) and not Path(text).is_file():  # which the parser would read
            yield key, text
        for group in SAFE if text.isidentifier() else ():
            yield from ((key, path) for path in _paths(group.partition(".")[0], text))


def _paths(group: str, name: str) -> set[str]:
    """The public and the full import path of Lightning's class `name`; none when the group has no such class."""
    value = getattr(import_module(f"lightning.pytorch.{group}"), name, None)
    return {f"lightning.pytorch.{group}.{name}", f"{value.__module__}.{name}"} if isinstance(value, type) else set()
