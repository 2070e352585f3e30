"""Read a table of own images: CSV, TSV or JSON lines with one image per row, and columns under their usual names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.text import nfc
from cifar_lit.data.photos.formats import IMAGES
from cifar_lit.data.progress import note_once

COLUMNS = {  # accepted names, ignoring case, spaces, hyphens and underscores
    "path": (
        "path", "file", "filename", "filepath", "image", "imagepath", "imagename", "imageid", "img", "imgpath", "id",
    ),
    "label": ("label", "labels", "class", "classname", "category", "target", "choice"),
    "split": ("split", "set", "subset"),
    "group": ("group",),
}  # fmt: skip


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

    The columns are named by the first row of CSV (with commas, semicolons or tabs), or by the keys of JSON objects. Of
    two columns, the second name may be any. A list has no names: each line is a path, then a label.

    Args:
        table: the file.
        group: the column of groups. Default: the column `group`, if the table has one.
        labelled: whether each row must have a label.
        columns: names of further columns, for `Row.values`.

    Raises:
        UsageError: a column is missing, a row has no path or label, or the file is not a table.
    """
    try:
        text = table.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{table} is not a UTF-8 text file: save it as CSV UTF-8") from None
    if table.suffix.lower() in (".jsonl", ".ndjson"):
        names, records = _objects(text)
    else:
        names, records = _cells(table, text)
    needed = ["path", "label"] if labelled else ["path"]
    places = _places(table, names, group, needed)
    further = [_place(table, names, column, "data.groups") for column in columns]
    rows = 0
    for number, cells in records:
        if not any(cells):
            continue
        rows += 1
        cells += [""] * (len(names) - len(cells))
        values = {column: cells[place] for column, place in places.items()}
        for column in needed:
            if not values[column]:
                raise UsageError(f"{table}, row {number} has no {column}")
        label, split, group_name = (nfc(values.get(column, "")) for column in ("label", "split", "group"))
        yield Row(number, values["path"], label, split, group_name, tuple(nfc(cells[place]) for place in further))
    if not rows:
        raise UsageError(f"{table} has no rows below its column names, {', '.join(names)}")


def _places(table: Path, names: Sequence[str], group: str | None, needed: Sequence[str]) -> dict[str, int]:
    """Return the place of each known column; raise UsageError if a needed one is missing."""
    plain = [_plain(name) for name in names]
    places: dict[str, int] = {}
    unknown = [place for place, name in enumerate(names) if name != group]
    for column, aliases in COLUMNS.items():
        for alias in reversed(aliases):  # the first has precedence
            if alias in plain:
                places[column] = plain.index(alias)
        unknown = [place for place in unknown if plain[place] not in aliases]
    labels = [name for place, name in enumerate(names) if plain[place] in COLUMNS["label"]]
    if len(labels) > 1:
        used = names[places["label"]]
        note_once(f"{table}: {used} is used of the columns that may be the label, {', '.join(labels)}")
    absent = [column for column in ("path", "label") if column not in places]
    if len(unknown) == len(absent) == 1:
        places[absent[0]] = unknown[0]
    rule = f"its first row must name the columns, {' and '.join(needed)} at least"
    for column in needed:
        if column not in places:
            accepted = ", ".join(COLUMNS[column][:6])
            fault = f"has no column for the {column} ({accepted}, …), only {', '.join(names)}"
            raise UsageError(f"{table} {fault}: {rule}")
    if group is not None:
        places["group"] = _place(table, names, group, "data.split.group")
    return places


def _place(table: Path, names: Sequence[str], column: str, setting: str) -> int:
    if column not in names:
        fault = f"{table} has no column {column!r} for {setting}, only {', '.join(names)}"
        raise UsageError(f"{fault}.{nearest(column, names)}")
    return names.index(column)


Records = Iterator[tuple[int, list[str]]]  # number and cells of each row


def _cells(table: Path, text: str) -> tuple[list[str], Records]:
    """Return the column names of a CSV, a TSV or a list of paths and labels, and its rows."""
    first = text.partition("\n")[0]
    if table.suffix.lower() == ".txt" and not re.search("[,;\t]", first):
        lines = enumerate(text.splitlines(), 1)
        return ["path", "label"], ((number, line.strip().rsplit(maxsplit=1)) for number, line in lines)
    delimiter = max(",;\t", key=first.count)
    if table.suffix.lower() == ".tsv":
        delimiter = "\t"
    rows = _csv_rows(text, delimiter)
    _, names = next(rows, (0, []))
    if len(names) == 2 and names[0].lower().endswith(IMAGES):
        return ["path", "label"], _csv_rows(text, delimiter)
    return names, rows


def _csv_rows(text: str, delimiter: str) -> Records:
    reader = csv.reader(StringIO(text), delimiter=delimiter)
    for cells in reader:
        if cells:
            yield reader.line_num, [cell.strip() for cell in cells]


def _objects(text: str) -> tuple[list[str], Records]:
    """Return the keys of all JSON objects, and the values of each in their order."""
    objects: list[tuple[int, dict[str, object]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                objects.append((number, dict(json.loads(line))))
            except (TypeError, ValueError):
                raise UsageError(f"row {number} of the table is no JSON object: write one object a line") from None
    names = list(dict.fromkeys(name for _, values in objects for name in values))
    return names, ((number, [_text(values.get(name)) for name in names]) for number, values in objects)


def _plain(name: str) -> str:
    """Return the name of a column in the form of `COLUMNS`."""
    return re.sub("[ _-]", "", name.lower())


def _text(value: object) -> str:
    if isinstance(value, dict | list | None):
        return ""
    return str(value).strip()
