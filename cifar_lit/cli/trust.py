"""What a configuration file may do: set plain values, and name classes that are known to be harmless.

A config.yaml travels with a run, so it may come from anyone. Naming a class imports its module, which runs its code; therefore

- what is typed on the command line is trusted: classes that flags name may be named by files too;
- of every file (`--config`, `--recipe PATH`, the config.yaml beside a checkpoint) only the classes in `SAFE` are taken, unless
  `--trust` is given, or the file is word for word a config.yaml that a run of this user wrote: such runs are resumed and tested
  as they were started. jsonargparse asks before each import, also for files that a file points to;
- tags of YAML (`!!python/…`), files too large, too deep, or growing by aliases are refused, with `--trust` too.

A file can still say where a run reads images and writes results: that is what it is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import yaml
from jsonargparse import set_parsing_settings

from cifar_lit.cli.flags import RECIPES, Command
from cifar_lit.data.cache import default_cache_dir
from cifar_lit.errors import UsageError

LARGEST = 1 << 15  # bytes; a run's own is about 5 KiB
DEEPEST = 20  # levels of nesting
MOST_VALUES = 20_000  # with aliases written out

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
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")}
_GROUPS = ("trainer", "model", "data")
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
    texts = [checked(file) for file in files]
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
    set_parsing_settings(import_path_allowlist=sorted(known | own))
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


def checked(file: Path) -> str:
    """The text of a configuration file; raises UsageError for one that would do more than set values."""
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UsageError(f"{file} was not read: a configuration has at most {LARGEST >> 10} KiB")
        text = content.decode()
        _look(file, yaml.compose(text, yaml.SafeLoader))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{file} is not valid YAML{place}: check its indentation and brackets") from None
    except (yaml.YAMLError, UnicodeDecodeError):  # characters that no text has
        raise UsageError(f"{file} is not valid YAML: it is no text in UTF-8") from None
    except RecursionError:
        raise UsageError(f"{file} was not read: it is nested too deep") from None
    return text


def _look(file: Path, root: yaml.Node | None) -> None:
    if root is None:
        return
    _count(file, root, {}, 0)
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file} must hold settings by name (trainer:, model:, data:), not just text or a list")
    for key, value in root.value:
        if key.value in _GROUPS and not isinstance(value, yaml.MappingNode):
            raise UsageError(f"{file}: {key.value} must hold settings by name, not {str(value.value)[:40]!r}")


def _count(file: Path, node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """The values below a node, aliases written out; raises UsageError for foreign tags, loops, depth and growth."""
    if node.tag not in _TAGS:
        raise UsageError(f"{file} was not read: it has the YAML tag {node.tag[:80]!r}; a configuration holds plain values only")
    if depth > DEEPEST or known.get(id(node)) == 0:
        raise UsageError(f"{file} was not read: it is nested too deep")
    if id(node) not in known:
        known[id(node)] = 0  # until it is counted: to meet it again means a loop
        known[id(node)] = 1 + sum(_count(file, inner, known, depth + 1) for inner in _inner(node))
    if known[id(node)] > MOST_VALUES:
        raise UsageError(f"{file} was not read: its aliases make more than {MOST_VALUES:,} values of it")
    return known[id(node)]


def _inner(node: yaml.Node) -> Sequence[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [one for pair in node.value for one in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
