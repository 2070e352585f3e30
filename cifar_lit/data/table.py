"""A table that lists own images: CSV, TSV or JSON lines with a row an image, its columns called as people call them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cifar_lit.errors import UsageError, nearest
from cifar_lit.files import file_size

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
COLUMNS = {  # by what is in them; upper case, spaces and underscores make no difference
    "path": ("path", "file", "filename", "image", "imagepath"),
    "label": ("label", "class", "category", "target"),
    "split": ("split", "set", "subset"),
    "group": ("group",),
}
MAX_BYTES, MAX_ROWS = 1 << 29, 2_000_000  # of a table; two million take 2 GB of memory
MAX_EMPTY_LINES = 500_000
MAX_LINE, MAX_COLUMNS = 1 << 20, 1000  # characters; the columns that are looked at


class Row(NamedTuple):
    """A row: its number, counted from 1 with the names of the columns, and its cells; split and group may be empty."""

    number: int
    path: str
    label: str
    split: str
    group: str


def read_table(table: Path, group: str | None = None) -> Iterator[Row]:
    """The rows of a table, one at a time.

    The first row of CSV (with commas, semicolons or tabs) names the columns, the keys of the first object those of JSON lines.

    Args:
        table: the file.
        group: the column of groups; one called `group` if not given and there is one.

    Raises:
        UsageError: where there is no such column, no path or label in a row, or this is no table.
    """
    records = _objects(table) if table.suffix.lower() in (".jsonl", ".ndjson") else _cells(table)
    names = next(records, (0, []))[1][:MAX_COLUMNS]
    plain = [_plain(name) for name in names]
    places = {
        kind: next((plain.index(name) for name in aliases if name in plain), None) for kind, aliases in COLUMNS.items()
    }
    columns = ", ".join(name[:80] for name in names[:20])
    for kind in ("path", "label"):
        if places[kind] is None:
            fault = f"has no column called {' or '.join(COLUMNS[kind])}, only {columns}" if any(names) else "is empty"
            raise UsageError(f"{table} {fault}: its first row must name the columns, path and label at least")
    if group is not None:
        if group not in names:
            raise UsageError(f"{table} has no column {group!r} for data.group, only {columns}.{nearest(group, names)}")
        places["group"] = names.index(group)
    rows = 0
    for number, cells in records:
        row = Row(number, *["" if place is None or place >= len(cells) else cells[place] for place in places.values()])
        if row.path and row.label:
            rows += 1
            yield row
        elif any(cells):
            raise UsageError(f"{table}, row {number} has no {'label' if row.path else 'path'}")
        if rows > MAX_ROWS:
            raise UsageError(f"{table} has more than {MAX_ROWS:,} rows")
    if not rows:
        raise UsageError(f"{table} has no rows below the names of its columns, {columns}")


def _cells(table: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV or TSV with their numbers, cells without spaces around them."""
    lines = _lines(table)
    first = next(lines, "")
    delimiter = "\t" if table.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UsageError(f"{table}, row {reader.line_num} cannot be read: {error}; is a quote left open?") from None


def _objects(table: Path) -> Iterator[tuple[int, list[str]]]:
    """The keys of the first of JSON lines, then of each the values in their order, with the numbers of the lines."""
    names: list[str] = []
    known: set[str] = set()
    for number, line in enumerate(_lines(table), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UsageError(f'{table}, row {number} is no JSON object such as {{"path": "1.jpg", "label": "cat"}}')
        if not names:
            names = [*values]
            known = set(names)
            yield 0, names
        if late := [
            name for name in values if name not in known and any(_plain(name) in COLUMNS[kind] for kind in COLUMNS)
        ]:
            raise UsageError(
                f"{table}, row {number} has {late[0][:80]!r}, which the first row has not: give it there, null if empty"
            )
        yield number, [_text(values.get(name)) for name in names]


def _plain(name: str) -> str:
    """The name of a column as `COLUMNS` has it."""
    return name.lower().replace("_", "").replace(" ", "")


def _text(value: Any) -> str:
    return "" if value is None or isinstance(value, dict | list) else str(value).strip()


def _lines(table: Path) -> Iterator[str]:
    """The lines of a text in UTF-8 with or without a byte order mark; raises UsageError for what is none."""
    try:
        file_size(table, MAX_BYTES)
        empty = 0
        with table.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MAX_LINE):
                if len(line) == MAX_LINE or "\0" in line:
                    raise UsageError(f"{table} is no text: a line is longer than {MAX_LINE:,} characters, or has a NUL")
                empty += line.isspace()
                if empty > MAX_EMPTY_LINES:
                    raise UsageError(f"{table} has more than {MAX_EMPTY_LINES:,} empty lines: remove them")
                yield line
    except UnicodeDecodeError:
        raise UsageError(f"{table} is no text in UTF-8: save it as CSV UTF-8") from None
    except OSError as error:
        raise UsageError(f"{table} cannot be read: {error.strerror}") from None
