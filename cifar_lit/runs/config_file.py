"""Read untrusted configuration files: YAML without tags and of limited size, with limited choices (`check_choices`).

All configuration files are read here, once, into plain values. The parser of the command line reads the text of a
setting as YAML, so a text that would become a list or a mapping there is refused: it has passed no limit.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from cifar_lit.errors import UsageError
from cifar_lit.files import read_text
from cifar_lit.hardware import core_count

MAX_BYTES = 1 << 15  # bytes; a run's config.yaml has about 5 KiB
MAX_DEPTH = 20  # levels of nesting
MAX_VALUES = 20_000  # with aliases expanded
MAX_LIST = 200  # elements of a list: jsonargparse copies a list for each of its elements
MAX_LENGTH = 4096  # characters of a text; the longest path of Linux
MAX_INTEGER = 1 << 63  # exceeds int64 of torch and numpy
_KINDS = ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _KINDS}
_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the loader of jsonargparse
# A file name of ModelCheckpoint ({epoch}), a name in brackets ([old]), a drive of Windows (D:).
_TEXT = re.compile(r"\{[\w/:.%]+\}|\[[\w/ -]+\]|\w+:")


def read_settings(file: Path) -> tuple[str, object]:
    """Return the text of a configuration file and its values; raise UsageError unless it sets only plain values."""
    fault = values = None
    try:
        text = read_text(file, MAX_BYTES)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return text, None
        fault = _fault(root)
        if not fault:
            values = loader.construct_document(root)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        fault = "it is nested too deeply"
    except yaml.MarkedYAMLError as error:
        place = ""
        if error.problem_mark:
            place = f" at line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        raise UsageError(f"{file} is not valid YAML{place}: check its indentation and brackets") from None
    except Exception:  # also errors of the YAML constructors
        raise UsageError(f"{file} is not UTF-8 text, or holds an invalid value such as an impossible date") from None
    if fault:
        raise UsageError(f"{file} was not read: {fault}")
    if not isinstance(values, dict):
        raise UsageError(f"{file} must hold settings by name (trainer:, model:, data:), not just text or a list")
    for group in ("trainer", "model", "data"):
        if not isinstance(values.get(group, {}), dict):
            raise UsageError(f"{file}: {group} must hold settings by name, not {str(values[group])[:40]!r}")
    return text, values


def plain_values(file: Path) -> Any:
    """Return the values in a configuration file, see `read_settings`."""
    return read_settings(file)[1]


def _expanded(node: yaml.Node, depth: int = 0) -> Iterator[tuple[yaml.Node, int]]:
    """Yield a node and all nodes below it with their depths. Aliases are expanded, perhaps without an end."""
    yield node, depth
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _expanded(key, depth + 1)
            yield from _expanded(value, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _expanded(value, depth + 1)


def _fault(root: yaml.Node) -> str | None:
    """Return why a document is refused; None if it has only plain values within the limits."""
    texts: set[int] = set()  # those checked
    for count, (node, depth) in enumerate(_expanded(root)):
        if node.tag not in _TAGS:
            return f"it has the YAML tag {node.tag[:80]!r}, but only plain values are allowed"
        if depth > MAX_DEPTH:
            return "it is nested too deeply"
        if count > MAX_VALUES:
            return f"its aliases expand to more than {MAX_VALUES:,} values"
        line = node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode) and len(node.value) > MAX_LIST:
            return f"the list at line {line} has more than {MAX_LIST} elements"
        if isinstance(node, yaml.ScalarNode) and id(node) not in texts:
            texts.add(id(node))
            if fault := _fault_of_text(node.value):
                return f"it has {fault} at line {line}"
    return None


def _fault_of_text(text: str) -> str | None:
    """Return what is wrong with the text of a value, quoted or not; None if nothing is."""
    if re.search("[\0\ud800-\udfff]", text):
        return "invalid Unicode or a NUL character"
    if len(text) > MAX_LENGTH:
        return f"a text of more than {MAX_LENGTH:,} characters"
    with suppress(ValueError, IndexError):
        integer = yaml.SafeLoader("").construct_yaml_int(yaml.ScalarNode("", text.strip()))
        if abs(integer) >= MAX_INTEGER:
            return "an integer of more than 64 bits"
    with suppress(yaml.YAMLError):  # the parser keeps an invalid text as text
        kinds = {type(event) for event in yaml.parse(text, _PARSER)}
        if not kinds.isdisjoint((yaml.MappingStartEvent, yaml.SequenceStartEvent)) and not _TEXT.fullmatch(text):
            return "a text that would be read as a list or as settings"
    return None


# ---- Paths, URLs and numbers of processes that an untrusted file may choose.

MAX_PROCESSES = max(8, core_count())
_COUNTS = {"devices", "workers"}
_LOCAL = {"logs", "root", "cache_dir", "ckpt_path", "labels"}  # allowed below the working folder
_NAMED = {"recipe", "filename", "name"}
PLACES = _LOCAL | _NAMED | {"url", "dirpath", "save_dir", "sub_dir", "version"}
PLACES |= {"default_root_dir", "model_registry"}
# A file name of at most 255 characters without control characters. Braces hold a metric of ModelCheckpoint, with a
# width below 100.
_NAME = re.compile(
    r"(?!\.\.?$)(?!.{256})(?:[^/\\{}\x00-\x1f\x7f-\x9f]|\{\w+(?:/\w+)*(?::0?\d{0,2}(?:\.\d{1,2})?[a-zA-Z%]?)?\})*"
)
_FORMAT = re.compile(r"\d{0,2}(?:\.\d{1,2})?[a-zA-Z%]?")  # numbers in a progress bar
MAX_METRIC_SETTINGS = 100  # values of all metrics together
MAX_METRIC_SETTING = 1000  # classes, labels or thresholds, for which torchmetrics allocates memory
_allowed: set[tuple[str, str]] = set()


def leaves(settings: object, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (names, text) of each value in nested settings. Dotted names are split."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from leaves(value, (*key, *str(name).rstrip("+").split(".")))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from leaves(value, key)
    elif settings is not None:
        yield key, str(settings)


def unsafe_choices(settings: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the leaves that an untrusted file must not set, see `check_choices`."""
    metric_settings = 0
    for key, text in leaves(settings):
        if key[0] != "model":
            if not _is_safe(key[-1], text):
                yield key, text
        elif key[1:2] == ("metrics",):
            metric_settings += 1
            if metric_settings > MAX_METRIC_SETTINGS or _is_above(text, MAX_METRIC_SETTING):
                yield key, text


def _is_safe(name: str, text: str) -> bool:
    """Return whether a file may set `name`, a setting of the data, the Trainer or a class of Lightning, to `text`."""
    if name in _COUNTS:
        number = text.replace(" ", "")
        return not number.isdecimal() or (len(number) <= 4 and int(number) <= MAX_PROCESSES)
    if name == "metrics_format":
        return _FORMAT.fullmatch(text) is not None
    if name in _NAMED:
        return _NAME.fullmatch(text) is not None
    if name in _LOCAL:
        return Path(text).expanduser().resolve().is_relative_to(Path.cwd())
    return name not in PLACES


def _is_above(text: str, limit: float) -> bool:
    try:
        return float(text) > limit
    except ValueError:
        return False


def allow_choices(settings: object) -> None:
    """Allow files to set settings to their values in `settings`, which the user has typed or trusts."""
    _allowed.update((key[-1], text) for key, text in leaves(settings))


def check_choices(settings: dict[str, Any]) -> None:
    """Raise UsageError for a value that a file must not set and that the user has neither typed nor trusted.

    | setting | values that a file may set |
    |---|---|
    | `logs`, `data.cache_dir`, `data.labels`, `ckpt_path` | paths below the working folder |
    | `data.root` | also a folder with a complete data set of ours, which is only read |
    | `recipe`; `filename`, `name` of callbacks and loggers | names without folders, used inside the run folder |
    | `metrics_format` of RichProgressBar, `{epoch:02d}` in `filename` | widths and digits below 100 |
    | `model.metrics` | at most 100 values, numbers of at most 1000 |
    | `trainer.devices`, `data.workers` | at most the number of cores, or eight |
    | `data.url` | none |
    | all other paths of the Trainer and of Lightning's classes (`dirpath`, `save_dir`, …) | none |
    """
    for key, text in unsafe_choices(settings):
        if (key[-1], text) in _allowed:
            continue
        reason, remedy = "which no file may choose", "type that setting yourself"
        if key == ("data", "root"):
            dataset = str(settings["data"].get("dataset", "cifar10"))
            if _has_data(dataset, text):
                continue
            reason = f"where {dataset[:80]} is not complete, and no file may choose a folder to write to"
            remedy = f"type --data-dir {shlex.quote(text[:200])} yourself"
        setting = ".".join(name for name in key if name != "init_args")
        raise UsageError(
            f"a configuration file sets {setting} to {text[:200]!r}, {reason}: "
            f"{remedy}, or give --trust if you know where the file comes from"
        )


def _has_data(dataset: str, root: str) -> bool:
    """Return whether `root` holds a complete built-in data set. Other sources could write there."""
    from cifar_lit.data.sources import SOURCES, SourceSettings  # imports torch

    return dataset in SOURCES and SOURCES[dataset].at_hand(SourceSettings(root=root))
