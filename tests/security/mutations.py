"""Inputs that nobody wrote, made of genuine ones: bytes, plain values, tables, YAML and zip files with parts changed."""

from __future__ import annotations

import copy
import csv
import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

ODD_TEXTS = (
    "", " ", "a", "-", "=1+1", "../x", "/", "~", "~0", "\0", "\n", "a\rb", "\x1b[2J", "\x1b]0;gone\x07", "\u202etxt", "\u200b",
    "\ud800", "[/b]", "[bold]", "{", "%s", "²", "٣", "1_0", "0x1", "1e999", "nan", "-inf", "None", "null", "9" * 30, "9" * 5000,
    "x" * 400, "é" * 200, "evil.Evil", "os.system", "<script>alert(1)</script>", "$\\frac$", "$x",
)  # fmt: skip
ODD_NUMBERS = (
    -1, 0, 1, 2, 3, 2**31, 2**53, 2**63, -(2**63) - 1, 10**12, 10**30, 10**400, -0.0, 0.5, 1e-320, 1e15, 1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip

texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=9)
atoms = st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | texts | st.integers(-(2**70), 2**70) | st.floats()
plain = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)  # as JSON and YAML have them


@st.composite
def damaged(draw: st.DrawFn, content: bytes, other: bytes = b"") -> bytes:
    """`content` with bytes changed, cut out, doubled or cut off, and from some place on as in `other`."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 9))
        match draw(st.sampled_from(["change", "change", "extreme", "remove", "insert", "double", "cut", "splice"])):
            case "change":
                data[place : place + length] = draw(st.binary(min_size=length, max_size=length))
            case "extreme":
                data[place : place + length] = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80"])) * length
            case "remove":
                del data[place : place + length]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=9))
            case "double":
                data[place:place] = data[place : place + 100 * length]
            case "cut":
                del data[place:]
            case "splice":
                data[place:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


@st.composite
def changed(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any] = plain) -> Any:
    """A nested value with up to three of its parts replaced by an odd one, left out, doubled or named otherwise."""
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
    """JSON of a changed value, damaged JSON of it, and what is none."""
    deep = st.sampled_from([30, 300]).map(lambda depth: b"[" * depth)
    return (
        changed(value).map(as_json) | changed(value).map(as_json) | damaged(as_json(value)) | plain.map(as_json) | deep
    )


YAML_WORDS = (
    "!!int ", "!!float ", "!!bool ", "!!null ", "!!timestamp ", "!!seq ", "!!map ", "!!merge ", "!!python/name:os.system ",
    "!x ", "&a ", "*a ", "<<: ", "? ", "- ", "[", "{", "]", "| ", "> ", "'", '"', "#", "\t", "\n", "---\n", "...\n",
    "%YAML 1.9\n", "2001-99-99", "2001-01-01T99:00:00", "0b", "0x", "1:99:99", "1__0", ".inf", ".nan", "~", "=", "<<",
    "9" * 5000, "\ufeff", "\x85",
)  # fmt: skip


@st.composite
def with_words(draw: st.DrawFn, text: str, words: Sequence[str]) -> bytes:
    """A text with some of `words` put before values or anywhere."""
    for _ in range(draw(st.integers(1, 3))):
        places = [place + 2 for place in range(len(text)) if text.startswith(": ", place)]
        place = draw(st.sampled_from(places) if places and draw(st.booleans()) else st.integers(0, len(text)))
        end = place + (draw(st.integers(0, 6)) if draw(st.booleans()) else 0)
        text = text[:place] + draw(st.sampled_from(words)) + text[end:]
    return text.encode(errors="surrogatepass")


def yaml_files(value: Any) -> st.SearchStrategy[bytes]:
    """YAML of a changed value, YAML with words of the language out of place, damaged YAML."""
    content = as_yaml(value)
    return changed(value).map(as_yaml) | with_words(content.decode(), YAML_WORDS) | damaged(content) | json_files(value)


def csv_files(content: str) -> st.SearchStrategy[bytes]:
    """Tables with odd cells, longer and shorter rows, and damaged ones."""

    first, further = (list(csv.reader(io.StringIO(content)))[part] for part in (slice(6), slice(6, None)))

    def written(rows: Any) -> bytes:
        file = io.StringIO()
        changed_rows = [row if isinstance(row, list) else [row] for row in (rows if isinstance(rows, list) else [rows])]
        csv.writer(file, lineterminator="\n").writerows(changed_rows + further)
        return file.getvalue().encode(errors="surrogatepass")

    return changed(first, texts | st.sampled_from(ODD_NUMBERS).map(str)).map(written) | damaged(content.encode())


@st.composite
def zip_files(draw: st.DrawFn, content: bytes) -> bytes:
    """A zip whose container is whole, its members damaged, left out, doubled, renamed or packed."""
    with zipfile.ZipFile(io.BytesIO(content)) as genuine:
        members = [(name, genuine.read(name)) for name in genuine.namelist()]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(members) - 1)) if draw(st.booleans()) else 0  # the pickle comes first
        name, data = members[place]
        members[place : place + 1] = draw(
            st.tuples(st.just(name), damaged(data)).map(lambda one: [one])
            | st.tuples(texts.filter(str.isprintable).map(lambda text: text or "a"), st.just(data)).map(
                lambda one: [one]
            )
            | st.just([(name, data)] * 2)
            | st.just([] if len(members) > 1 else [(name, data)])
        )
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", draw(st.sampled_from([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED]))
    ) as container:
        for name, data in members:
            container.writestr(name, data)
    return file.getvalue()
