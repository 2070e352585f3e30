"""What a configuration file may do: set plain values, and name classes that are known to be harmless.

A config.yaml travels with a run, so it may come from anyone. Naming a class imports its module, which runs its code; therefore

- what is typed on the command line is trusted: classes that flags name may be named by files too;
- of every file (`--config`, `--recipe PATH`, the config.yaml beside a checkpoint) only the classes in `SAFE` and those of
  `SAFE_PACKAGE` are taken, unless `--trust` is given, or the file is word for word a config.yaml that a run of this user wrote.
  jsonargparse asks before each import, also for files that a file points to;
- so it is with nets, optimizers and data sets of one's own, whose names are paths to import and no plain words;
- tags of YAML (`!!python/…`), files too large, too deep, or growing by aliases are refused, with `--trust` too.

A file can still say where a run reads images and writes results: that is what it is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import set_parsing_settings

from cifar_lit.cli.errors import UNTRUSTED
from cifar_lit.cli.flags import RECIPES, Command
from cifar_lit.data.cache import default_cache_dir
from cifar_lit.errors import UsageError
from cifar_lit.plugins import allow_imports
from cifar_lit.runs.config_file import plain_text, plain_values

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
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_CLASS = re.compile(r"\b[A-Z]\w+\b")
_PLAIN_NAME = re.compile(r"[\w-]+")  # of what comes with the package or with torchvision

_allowed_before: set[str] = set()


def guard(command: Command, base: Path | None) -> None:
    """Checks every file that a command takes settings from, and sets which classes its parser may import from now on.

    base: the weakest settings, as for `arguments`. Raises UsageError for a file that is refused.
    """
    files = [base] if base is not None and base.parent != RECIPES else []
    files += [Path(config).expanduser() for config in command.configs]
    files += [Path(value) for group in ("trainer", "model", "data") for value in command.values(group) if Path(value).is_file()]
    typed = {value for flag in ("model.net", "model.optimizer", "data.dataset") for value in command.values(flag)}
    trusted = []
    for file in files:
        text = plain_text(file)
        if command.trust or _mark(text).is_file():
            trusted.append(text)
        elif untrusted := sorted(_own_names(plain_values(file)) - typed):
            raise UsageError(UNTRUSTED.format(untrusted[0]))
    allow([*command.flags, *trusted])


def allow_own_run(config: Path) -> None:
    """Lets the net and the data set that a config.yaml names be imported, if a run of this user wrote it."""
    if _mark(plain_text(config)).is_file():
        allow_imports(_own_names(plain_values(config)))


def _own_names(settings: Any) -> set[str]:
    """Nets, optimizers and data sets of one's own in nested settings; a key may be `net`, `model.net` or `model: {net: …}`."""
    names: set[str] = set()
    for key, value in settings.items() if isinstance(settings, dict) else ():
        names |= _own_names(value)
        nameable = str(key).rpartition(".")[2] in ("net", "optimizer", "dataset")
        if nameable and isinstance(value, str) and not _PLAIN_NAME.fullmatch(value):
            names.add(value)
    return names


def remember(text: str) -> None:
    """Notes that a run of this user writes `text` to its config.yaml, where it names classes that files may not name."""
    if "class_path" not in text and not _own_names(yaml.safe_load(text)):
        return
    with suppress(OSError):  # a home that cannot be written: --trust will be asked for
        _mark(text).parent.mkdir(parents=True, exist_ok=True)
        _mark(text).touch()


def _mark(text: str) -> Path:
    return default_cache_dir().expanduser() / "own-configurations" / sha256(text.encode()).hexdigest()


def allow(words: Iterable[str]) -> None:
    """Lets parsers of this process import the classes in `SAFE` and those that `words` name, and nothing else."""
    known = {path for group, names in SAFE.items() for name in names for path in _paths(group, name)}
    named = {name for word in words for name in named_classes(word)}
    own = {name for name in named if name.partition(".")[0] != "jsonargparse"}
    set_parsing_settings(import_path_denylist=["*", *sorted(_allowed_before)])
    set_parsing_settings(import_path_allowlist=sorted(known | own | {SAFE_PACKAGE}))
    allow_imports(own)
    _allowed_before.update(own - known)


def named_classes(word: str) -> set[str]:
    """Import paths in a word of a command line, or in a text; a bare class name stands for Lightning's of that name."""
    names = set(_PATH.findall(word))
    for name in _CLASS.findall(word):
        names |= {path for group in SAFE for path in _paths(group.partition(".")[0], name)}
    return names


def _paths(group: str, name: str) -> set[str]:
    """The public and the full import path of Lightning's class `name`; none when the group has no such class."""
    value = getattr(import_module(f"lightning.pytorch.{group}"), name, None)
    return {f"lightning.pytorch.{group}.{name}", f"{value.__module__}.{name}"} if isinstance(value, type) else set()
