"""What a configuration file may do: set plain values, and name classes that are known to be harmless.

A config.yaml travels with a run, so it may come from anyone. Naming a class imports its module, which runs its code; therefore

- what is typed on the command line is trusted: classes that flags name may be named by files too;
- of every file (`--config`, `--recipe PATH`, the config.yaml beside a checkpoint) only the classes in `SAFE` and those
  of `SAFE_PACKAGE` are taken, unless `--trust` is given, or the file is word for word a config.yaml that a run of this user wrote:
  such runs are resumed and tested as they were started. jsonargparse asks before each import, also for files that a file points to;
- tags of YAML (`!!python/…`), files too large, too deep, or growing by aliases are refused, with `--trust` too.

A file can still say where a run reads images and writes results: that is what it is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from jsonargparse import set_parsing_settings

from cifar_lit.cli.flags import RECIPES, Command
from cifar_lit.data.cache import default_cache_dir
from cifar_lit.plugins import allow_imports
from cifar_lit.runs.config_file import plain_text

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
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_CLASS = re.compile(r"\b[A-Z]\w+\b")

_allowed_before: set[str] = set()


def guard(command: Command, base: Path | None) -> None:
    """Checks every file that a command takes settings from, and sets which classes its parser may import from now on.

    base: the weakest settings, as for `arguments`. Raises UsageError for a file that is refused.
    """
    files = [Path(config).expanduser() for config in command.configs]
    if base is not None and base.parent != RECIPES:
        files.insert(0, base)
    texts = [plain_text(file) for file in files]
    allow(command.flags + [text for text in texts if command.trust or _mark(text).is_file()])


def remember(text: str) -> None:
    """Notes that a run of this user writes `text` to its config.yaml, where it names classes that files may not name."""
    if "class_path" not in text:
        return
    with suppress(OSError):  # a home that cannot be written: --trust will be asked for
        _mark(text).parent.mkdir(parents=True, exist_ok=True)
        _mark(text).touch()


def _mark(text: str) -> Path:
    return default_cache_dir().expanduser() / "own-configurations" / sha256(text.encode()).hexdigest()


def allow(words: Iterable[str]) -> None:
    """Lets parsers of this process import the classes in `SAFE` and those that `words` name, and nothing else."""
    named = {name for word in words for name in named_classes(word)}
    known = _known()
    own = {name for name in named if name != "jsonargparse" and not name.startswith("jsonargparse.")}
    set_parsing_settings(import_path_denylist=["*", *sorted(_allowed_before)])
    set_parsing_settings(import_path_allowlist=sorted(known | own | {SAFE_PACKAGE}))
    allow_imports(own)
    _allowed_before.update(own - known)


def named_classes(word: str) -> set[str]:
    """Import paths in a word of a command line, or in a text; a bare class name stands for Lightning's of that name."""
    found = set(_DOTTED.findall(word))
    for name in _CLASS.findall(word):
        found |= {path for group in SAFE for path in _paths(group.partition(".")[0], name)}
    return found


def _known() -> set[str]:
    return {path for group, names in SAFE.items() for name in names for path in _paths(group, name)}


def _paths(group: str, name: str) -> set[str]:
    """The public and the full import path of Lightning's class `name`; none when the group has no such class."""
    from importlib import import_module

    found = getattr(import_module(f"lightning.pytorch.{group}"), name, None)
    return {f"lightning.pytorch.{group}.{name}", f"{found.__module__}.{name}"} if isinstance(found, type) else set()
