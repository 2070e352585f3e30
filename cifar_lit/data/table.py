"""Read a table of own images: CSV, TSV or JSON lines with one image per row, and columns under their usual names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cifar_lit.data.formats import IMAGES
from cifar_lit.data.progress import note_once
from cifar_lit.errors import UsageError, nearest
from cifar_lit.files import file_size
from cifar_lit.text import nfc

COLUMNS = {  # accepted names, ignoring case, spaces, hyphens and underscores
    "path": (
        "path", "file", "filename", "filepath", "image", "imagepath", "imagename", "imageid", "img", "imgpath", "id",
    ),
    "label": ("label", "labels", "class", "classname", "category", "target", "choice"),
    "split": ("split", "set", "subset"),
    "group": ("group",),
}  # fmt: skip
MAX_BYTES = 1 << 29
MAX_ROWS = 2_000_000  # they take 2 GB of memory
MAX_EMPTY_LINES = 500_000
MAX_LINE = 1 << 20  # characters
MAX_COLUMNS = 1000  # further columns are ignored


class Row(NamedTuple):
    """A row of the table. `number` is 1 for the header row; `split` and `group` may be empty."""

    number: int
    path: str
    label: str
    split: str
    group: str
    values: tuple[str, ...] = ()  # further columns, see `read_table`


def read_table(
    table: Path, group: str | None = None, labelled: bool = True, columns: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield the rows of a table.

    The columns are named by the first row of CSV (with commas, semicolons or tabs), or by the keys of the first JSON
    object. Of two columns, the second name may be any. A list has no names: each line is a path, then a label.

    Args:
        table: the file.
        group: the column of groups. Default: the column `group`, if the table has one.
        labelled: whether each row must have a label.
        columns: names of further columns, for `Row.values`.

    Raises:
        UsageError: a column is missing, a row has no path or label, or the file is not a table.
    """
    records = _cells(table)
    if table.suffix.lower() in (".jsonl", ".ndjson"):
        records = _objects(table)
    names = next(records, (0, []))[1][:MAX_COLUMNS]
    if len(names) == 2 and names[0].lower().endswith(IMAGES):
        records = chain([(1, names)], records)
        names = ["path", "label"]
    positions = _positions(table, names, group, labelled)
    places = [_place(table, names, column, "data.groups") for column in columns]
    rows = 0
    for number, cells in records:
        values = dict.fromkeys(COLUMNS, "")
        for column, place in positions.items():
            if place < len(cells):
                values[column] = cells[place]
        further = tuple(nfc(cells[place]) if place < len(cells) else "" for place in places)
        row = Row(number, values["path"], nfc(values["label"]), nfc(values["split"]), nfc(values["group"]), further)
        if re.search("[\0\ud800-\udfff]", row.path):  # no file system stores half of a surrogate pair
            raise UsageError(f"{table}, row {number}: no file can be called {row.path[:80]!r}")
        if row.path and (row.label or not labelled):
            rows += 1
            yield row
        elif row.path:
            raise UsageError(f"{table}, row {number} has no label")
        elif any(cells):
            raise UsageError(f"{table}, row {number} has no path")
        if rows > MAX_ROWS:
            raise UsageError(f"{table} has more than {MAX_ROWS:,} rows")
    if not rows:
        raise UsageError(f"{table} has no rows below its column names, {_listed(names)}")


def _positions(table: Path, names: Sequence[str], group: str | None, labelled: bool) -> dict[str, int]:
    """Return the place of each known column; raise UsageError if one is missing. Arguments: see `read_table`."""
    plain = [_plain(name) for name in names]
    positions: dict[str, int] = {}
    unknown = list(range(len(names)))
    for column, aliases in COLUMNS.items():
        for alias in reversed(aliases):  # the first has precedence
            if alias in plain:
                positions[column] = plain.index(alias)
        unknown = [place for place in unknown if plain[place] not in aliases and names[place] != group]
    labels = [name[:80] for place, name in enumerate(names) if plain[place] in COLUMNS["label"]]
    if labelled and len(labels) > 1:
        used = names[positions["label"]][:80]
        note_once(f"{table}: {used} is used of the columns that may be the label, {', '.join(labels)}")
    absent = [column for column in ("path", "label") if column not in positions]
    if len(unknown) == len(absent) == 1:
        positions[absent[0]] = unknown[0]
    rule = "its first row must name the columns, path at least"
    if labelled:
        rule = "its first row must name the columns, path and label at least"
    if not any(names):
        raise UsageError(f"{table} is empty: {rule}")
    for column in ("path", "label"):
        if column not in positions and (labelled or column == "path"):
            accepted = ", ".join(COLUMNS[column][:6])
            fault = f"has no column for the {column} ({accepted}, …), only {_listed(names)}"
            raise UsageError(f"{table} {fault}: {rule}")
    if group is not None:
        positions["group"] = _place(table, names, group, "data.split.group")
    return positions


def _place(table: Path, names: Sequence[str], column: str, setting: str) -> int:
    if column not in names:
        fault = f"{table} has no column {column!r} for {setting}, only {_listed(names)}"
        raise UsageError(f"{fault}.{nearest(column, names)}")
    return names.index(column)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:80] for name in names[:20])


def _cells(table: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV, a TSV or a list of paths and labels with their numbers; cells are stripped."""
    lines = _lines(table)
    first = next(lines, "")
    if table.suffix.lower() == ".txt" and not re.search("[,;\t]", first):
        yield 0, ["path", "label"]
        for number, line in enumerate(chain([first], lines), 1):
            yield number, line.strip().rsplit(maxsplit=1)
        return
    delimiter = max(",;\t", key=first.count)
    if table.suffix.lower() == ".tsv":
        delimiter = "\t"
    reader = csv.reader(chain([first], lines), delimiter=delimiter)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UsageError(f"{table}, row {reader.line_num} cannot be read: {error}; is a quote left open?") from None


def _objects(table: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the keys of the first JSON object, then the values of each object in their order, with the line numbers."""
    names: list[str] = []
    first_keys: set[str] = set()
    for number, line in enumerate(_lines(table), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise UsageError(f'{table}, row {number} is not a JSON object such as {{"path": "1.jpg", "label": "cat"}}')
        if not names:
            names = [*values]
            first_keys = set(names)
            yield 0, names
        for name in values.keys() - first_keys:
            if _plain(name) in chain.from_iterable(COLUMNS.values()):
                fault = f"row {number} has {name[:80]!r}, which the first row lacks: add it there, null if empty"
                raise UsageError(f"{table}, {fault}")
        yield number, [_text(values.get(name)) for name in names]


def _plain(name: str) -> str:
    """Return the name of a column in the form of `COLUMNS`."""
    return re.sub("[ _-]", "", name.lower())


def _text(value: object) -> str:
    if value is None or isinstance(value, dict | list):
        return ""
    return str(value).strip()


def _lines(table: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, with or without a byte order mark. Raise UsageError for any other file."""
    try:
        file_size(table, MAX_BYTES)
        empty = 0
        with table.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(MAX_LINE):
                if len(line) == MAX_LINE or "\0" in line:
                    fault = f"a line is longer than {MAX_LINE:,} characters, or has a NUL"
                    raise UsageError(f"{table} is not a text file: {fault}")
                empty += line.isspace()
                if empty > MAX_EMPTY_LINES:
                    raise UsageError(f"{table} has more than {MAX_EMPTY_LINES:,} empty lines: remove them")
                yield line
    except UnicodeDecodeError:
        raise UsageError(f"{table} is not a UTF-8 text file: save it as CSV UTF-8") from None
    except OSError as error:
        raise UsageError(f"{table} cannot be read: {error.strerror}") from None
