"""Hypothesis strategies that mutate genuine inputs: bytes, plain values, tables, YAML and zip files."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import zipfile
from collections.abc import Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

ODD_TEXTS = (
    "", " ", "a", "-", "=1+1", "../x", "/", "~", "~0", "\0", "\n", "a\rb", "\x1b[2J", "\x1b]0;gone\x07", "\u202etxt",
    "\u200b", "\ud800", "[/b]", "[bold]", "{", "%s", "²", "٣", "1_0", "0x1", "1e999", "nan", "-inf", "None", "null",
    "9" * 30, "9" * 5000, "x" * 400, "é" * 200, "evil.Evil", "os.system", "<script>alert(1)</script>", "$\\frac$", "$x",
)  # fmt: skip
ODD_NUMBERS = (
    -1, 0, 1, 2, 3, 2**31, 2**53, 2**63, -(2**63) - 1, 10**12, 10**30, 10**400, -0.0, 0.5, 1e-320, 1e15, 1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip

texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=9)
atoms = st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | texts | st.integers(-(2**70), 2**70) | st.floats()
# Values of JSON and YAML.
plain = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes, other: bytes = b"") -> bytes:
    """`content` with bytes changed, removed, doubled or cut off, or spliced with `other`."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 9))
        match draw(st.sampled_from(["change", "change", "extreme", "remove", "insert", "double", "cut", "splice"])):
            case "change":
                data[start : start + length] = draw(st.binary(min_size=length, max_size=length))
            case "extreme":
                data[start : start + length] = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80"])) * length
            case "remove":
                del data[start : start + length]
            case "insert":
                data[start:start] = draw(st.binary(min_size=1, max_size=9))
            case "double":
                data[start:start] = data[start : start + 100 * length]
            case "cut":
                del data[start:]
            case "splice":
                data[start:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


@st.composite
def changed(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any] = plain) -> Any:
    """A nested value with up to three parts replaced by odd ones, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        value = _changed_once(draw, value, odd)
    return value


def _changed_once(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any]) -> Any:
    if not isinstance(value, dict | list) or not value or not draw(st.integers(0, 9)):
        return draw(odd)
    key = draw(st.sampled_from([*value] if isinstance(value, dict) else range(len(value))))
    match draw(st.sampled_from(["within", "within", "within", "within", "remove", "add", "rename"])):
        case "within":
            value[key] = _changed_once(draw, value[key], odd)
        case "remove":
            del value[key]
        case "add" if isinstance(value, list):
            value.insert(key, draw(odd))
        case _ if isinstance(value, list):
            value.append(value[key])
        case "add":
            value[draw(texts)] = draw(odd)
        case "rename":
            value[draw(texts)] = value.pop(key)
    return value


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, sort_keys=False).encode()


def json_files(value: Any) -> st.SearchStrategy[bytes]:
    """JSON of a changed value (twice as often), damaged JSON, other JSON and deep nesting."""
    valid = (changed(value).map(as_json) for _ in range(2))
    return st.one_of(*valid, damaged(as_json(value)), plain.map(as_json), st.sampled_from([b"[" * 30, b"[" * 300]))


YAML_WORDS = (
    "!!int ", "!!float ", "!!bool ", "!!null ", "!!timestamp ", "!!seq ", "!!map ", "!!merge ",
    "!!python/name:os.system ", "!x ", "&a ", "*a ", "<<: ", "? ", "- ", "[", "{", "]", "| ", "> ", "'", '"', "#", "\t",
    "\n", "---\n", "...\n", "%YAML 1.9\n", "2001-99-99", "2001-01-01T99:00:00", "0b", "0x", "1:99:99", "1__0",
    ".inf", ".nan", "~", "=", "<<", "9" * 5000, "\ufeff", "\x85",
)  # fmt: skip


@st.composite
def with_words(draw: st.DrawFn, text: str, words: Sequence[str]) -> bytes:
    """A text with some of `words` inserted before values or anywhere."""
    for _ in range(draw(st.integers(1, 3))):
        values = [match.end() for match in re.finditer(": ", text)]
        index = draw(st.sampled_from(values) if values and draw(st.booleans()) else st.integers(0, len(text)))
        end = index + (draw(st.integers(0, 6)) if draw(st.booleans()) else 0)
        text = text[:index] + draw(st.sampled_from(words)) + text[end:]
    return text.encode(errors="surrogatepass")


def yaml_files(value: Any) -> st.SearchStrategy[bytes]:
    """YAML of a changed value, YAML with misplaced tokens, damaged YAML and JSON."""
    content = as_yaml(value)
    return changed(value).map(as_yaml) | with_words(content.decode(), YAML_WORDS) | damaged(content) | json_files(value)


def csv_files(content: str) -> st.SearchStrategy[bytes]:
    """Tables with odd cells or rows of other lengths in the first six lines, and damaged tables."""
    rows = list(csv.reader(io.StringIO(content)))

    def as_csv(first: Any) -> bytes:
        file = io.StringIO()
        first = [row if isinstance(row, list) else [row] for row in (first if isinstance(first, list) else [first])]
        csv.writer(file, lineterminator="\n").writerows(first + rows[6:])
        return file.getvalue().encode(errors="surrogatepass")

    return changed(rows[:6], texts | st.sampled_from(ODD_NUMBERS).map(str)).map(as_csv) | damaged(content.encode())


@st.composite
def zip_files(draw: st.DrawFn, content: bytes) -> bytes:
    """A valid zip whose members are damaged, removed, doubled, renamed or compressed."""
    with zipfile.ZipFile(io.BytesIO(content)) as genuine:
        members = [(name, genuine.read(name)) for name in genuine.namelist()]
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(members) - 1)) if draw(st.booleans()) else 0  # the pickle is the first
        name, data = members[index]
        match draw(st.sampled_from(["damage", "rename", "double", "remove"])):
            case "damage":
                members[index] = name, draw(damaged(data))
            case "rename":
                members[index] = draw(texts.filter(str.isprintable)) or "a", data
            case "double":
                members.insert(index, (name, data))
            case "remove" if len(members) > 1:
                del members[index]
    file = io.BytesIO()
    method = draw(st.sampled_from([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(file, "w", method) as container:
        for name, data in members:
            container.writestr(name, data)
    return file.getvalue()
