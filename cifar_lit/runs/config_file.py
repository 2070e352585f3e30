"""Configuration files as plain values: YAML without tags, of bounded size, depth and growth; they may come from anyone.

And what such a file may choose: see `check_choices`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cifar_lit.errors import UsageError
from cifar_lit.files import read_text
from cifar_lit.hardware import core_count

MAX_BYTES = 1 << 15  # bytes; a run's own is about 5 KiB
MAX_DEPTH = 20  # levels of nesting
MAX_VALUES = 20_000  # with aliases written out
MAX_LIST = 200  # elements of a list: jsonargparse copies a list for each of its elements
MAX_DIGITS = 64  # characters of an integer
MAX_INTEGER = 1 << 63  # the first that torch and numpy cannot hold
_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")
}
_INTEGER = "tag:yaml.org,2002:int"


def plain_values(file: Path) -> Any:
    """What a configuration file holds; raises UsageError for one that would do more than set values, or cannot be read."""
    text = plain_text(file)
    try:
        return yaml.safe_load(text)
    except Exception:  # what a value leads to that is not of its tag or form: a list as a name, the 99th of a month
        raise UsageError(f"{file} holds values that no setting can have") from None


def plain_text(file: Path) -> str:
    """The text of a configuration file; raises UsageError for one that would do more than set values."""
    try:
        text = read_text(file, MAX_BYTES)
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ", or no text in UTF-8"
        raise UsageError(f"{file} is not valid YAML{place}: check its indentation and brackets") from None
    except RecursionError:
        raise UsageError(f"{file} was not read: it is nested too deep") from None
    if root is None:
        return text
    _count(file, root, {}, 0)
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file} must hold settings by name (trainer:, model:, data:), not just text or a list")
    for key, value in root.value:
        if key.value in ("trainer", "model", "data") and not isinstance(value, yaml.MappingNode):
            raise UsageError(f"{file}: {key.value} must hold settings by name, not {str(value.value)[:40]!r}")
    return text


def _count(file: Path, node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Count the values below a node with aliases written out.

    Raise UsageError for foreign tags, huge integers, long lists, loops, depth and growth.
    """
    if node.tag not in _TAGS:
        raise UsageError(
            f"{file} was not read: it has the YAML tag {node.tag[:80]!r}; a configuration holds plain values only"
        )
    if node.tag == _INTEGER and isinstance(node, yaml.ScalarNode) and _is_huge(node):
        raise UsageError(
            f"{file} was not read: it has an integer of more than 64 bits at line {node.start_mark.line + 1}"
        )
    if isinstance(node, yaml.SequenceNode) and len(node.value) > MAX_LIST:
        raise UsageError(
            f"{file} was not read: the list at line {node.start_mark.line + 1} has more than {MAX_LIST} elements"
        )
    if depth > MAX_DEPTH or known.get(id(node)) == 0:
        raise UsageError(f"{file} was not read: it is nested too deep")
    if id(node) not in known:
        known[id(node)] = 0  # until it is counted: to meet it again means a loop
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [one for pair in inner for one in pair] if isinstance(node, yaml.MappingNode) else inner
        known[id(node)] = 1 + sum(_count(file, one, known, depth + 1) for one in inner)
    if known[id(node)] > MAX_VALUES:
        raise UsageError(f"{file} was not read: its aliases make more than {MAX_VALUES:,} values of it")
    return known[id(node)]


def _is_huge(node: yaml.ScalarNode) -> bool:
    """Return whether an integer, in any of YAML's notations, does not fit into 64 bits."""
    try:
        return len(node.value) > MAX_DIGITS or abs(yaml.SafeLoader("").construct_yaml_int(node)) >= MAX_INTEGER
    except ValueError:  # a text tagged as an integer, refused when it is constructed
        return False


# ---- What a file may choose of places that are read, written and fetched from, and of processes.

MAX_PROCESSES = max(8, core_count())
_COUNTS = {"devices", "workers"}
_NEAR = {"logs", "root", "cache_dir", "ckpt_path"}  # in the working folder
_NAMED = {"recipe", "filename", "name"}
PLACES = _NEAR | _NAMED | {"url", "dirpath", "save_dir", "sub_dir", "version", "default_root_dir", "model_registry"}
# A file name of at most 255 characters, none a control character. In braces a metric, as ModelCheckpoint takes them, with a
# width below 100.
_NAME = re.compile(
    r"(?!\.\.?$)(?!.{256})(?:[^/\\{}\x00-\x1f\x7f-\x9f]|\{\w+(?:/\w+)*(?::0?\d{0,2}(?:\.\d{1,2})?[a-zA-Z%]?)?\})*"
)
_FORMAT = re.compile(r"\d{0,2}(?:\.\d{1,2})?[a-zA-Z%]?")  # of numbers in a progress bar
MAX_METRIC_SETTINGS = 100  # numbers and words of all metrics together
MAX_METRIC_SETTING = 1000  # classes, labels or thresholds of a torchmetrics class, which reserves memory for them
_allowed: set[tuple[str, str]] = set()


def leaves(settings: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every single value in nested settings as text, with the names that lead to it; a name may be dotted (`model.net`)."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from leaves(value, (*key, *str(name).rstrip("+").split(".")))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from leaves(value, key)
    elif settings is not None:
        yield key, str(settings)


def unsafe_choices(settings: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Those of `leaves` that a file may not decide on: see `check_choices`."""
    metric_settings = 0
    for key, text in leaves(settings):
        name = key[-1]
        plain = name in _NAMED and _NAME.fullmatch(text)
        near = name in _NEAR and Path(text).expanduser().resolve().is_relative_to(Path.cwd())
        number = text.replace(" ", "") if name in _COUNTS else ""
        many = number.isdecimal() and (len(number) > 4 or int(number) > MAX_PROCESSES)
        wide = name == "metrics_format" and not _FORMAT.fullmatch(text)
        if key[0] != "model" and (many or wide or (name in PLACES and not plain and not near)):
            yield key, text
        if key[:2] == ("model", "metrics"):
            metric_settings += 1
            if metric_settings > MAX_METRIC_SETTINGS or _is_above(text, MAX_METRIC_SETTING):
                yield key, text


def _is_above(text: str, limit: float) -> bool:
    """Return whether a text is a number above `limit`."""
    try:
        return float(text) > limit
    except ValueError:
        return False


def allow_choices(settings: Any) -> None:
    """Lets files choose what `settings` do, which the user typed or trusts, under the same names."""
    _allowed.update((key[-1], text) for key, text in leaves(settings))


def check_choices(settings: dict[str, Any]) -> None:
    """Raises UsageError where nested settings choose what neither the user has typed or trusted, nor a file may decide on.

    | setting | what a file may say |
    |---|---|
    | `logs`, `data.cache_dir`, `ckpt_path` | places in the working folder |
    | `data.root` | also one elsewhere, where a data set of ours is complete: it is read, nothing is written there |
    | `recipe`; `filename`, `name` of callbacks and loggers | names without folders; Lightning puts them into the run's |
    | `metrics_format` of RichProgressBar, `{epoch:02d}` in `filename` | widths and digits below 100 |
    | `model.metrics` | at most 100 settings, numbers of at most 1000 |
    | `trainer.devices`, `data.workers` | as many processes as the machine has cores, or eight |
    | `data.url`, and all other places of Lightning's classes (`dirpath`, `save_dir`, …) and the Trainer's | nothing |
    """
    for key, text in unsafe_choices(settings):
        if (key[-1], text) in _allowed:
            continue
        fault, remedy = "which no file may choose", "type that setting yourself"
        if key == ("data", "root"):
            dataset = str(settings["data"].get("dataset", "cifar10"))
            if _has_data(dataset, text):
                continue
            fault = f"where {dataset[:80]} is not complete, and no file may choose a place to write to"
            remedy = f"type --data-dir {shlex.quote(text[:200])} yourself"
        setting = ".".join(name for name in key if name != "init_args")
        line = f"a configuration file sets {setting} to {text[:200]!r}, {fault}"
        raise UsageError(f"{line}: {remedy}, or give --trust if you know where the file comes from")


def _has_data(dataset: str, root: str) -> bool:
    """Return whether `root` holds a complete data set of ours, which is then only read. Other sources may write there."""
    from cifar_lit.data.sources import SOURCES, SourceSettings, at_hand  # imports torch

    return dataset in SOURCES and at_hand(dataset, SourceSettings(root=root))
