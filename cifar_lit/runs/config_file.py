"""Configuration files as plain values: YAML without tags, of bounded size, depth and growth; they may come from anyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cifar_lit.errors import UsageError

MAX_BYTES = 1 << 15  # bytes; a run's own is about 5 KiB
MAX_DEPTH = 20  # levels of nesting
MAX_VALUES = 20_000  # with aliases written out
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")}


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
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"{file} was not read: a configuration has at most {MAX_BYTES >> 10} KiB")
        text = content.decode()
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
    """The values below a node, aliases written out; raises UsageError for foreign tags, loops, depth and growth."""
    if node.tag not in _TAGS:
        raise UsageError(f"{file} was not read: it has the YAML tag {node.tag[:80]!r}; a configuration holds plain values only")
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
