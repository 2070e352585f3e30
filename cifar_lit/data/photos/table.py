"""Read a table of own images: CSV, TSV or JSON lines with one image per row, and columns under their usual names."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import torch

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.files import as_on_disk
from cifar_lit.base.text import counted, listed, nfc, note_once
from cifar_lit.data.image_set import ImageSet, check_class_names
from cifar_lit.data.photos.decode import IMAGES
from cifar_lit.data.photos.layout import (
    PARTS,
    TABLES,
    Listing,
    Tree,
    file_at,
    note_similar_classes,
    part_of,
    sort_classes,
    walk,
)

# Accepted names of columns, ignoring case, spaces, hyphens and underscores. The first has precedence.
COLUMNS = {
    "path": "path file filename filepath image imagepath imagename imageid img imgpath idcode id",
    "label": "label labels class classname category target choice breed species diagnosis dx klasse clase 标签 类别",
    "split": "split set subset usage partition",
    "group": "group",
}
FEW_IMAGES = 3  # a label with fewer cannot be in training, validation and test images
INDEX = re.compile(r"(Unnamed: \d+)?")  # the column of row numbers that pandas writes
UNKNOWN_LABELS = "unknown_labels"
OWN = {"original_label", "reviewed", UNKNOWN_LABELS}  # columns that a review writes
YES, NO = {"1", "1.0", "true", "yes"}, {"", "0", "0.0", "false", "no"}
UNKNOWN = {"", "-1", "-1.0"}  # in a column of a label, as in CheXpert
MISSING = {"", "nan", "<na>", "null"}  # an empty cell as pandas and databases write it

Record = dict[str, str]  # the cells of a row by column


class Row(NamedTuple):
    """A row of the table. `number` is 1 for the header row; `split` is a part, empty, or another word."""

    number: int
    cells: Record
    path: str
    label: str = ""
    split: str = ""
    group: str = ""
    unknown: Sequence[str] = ()  # labels of which it is not known whether the image has them


class Table(NamedTuple):
    """The rows of a table, the columns that are neither read nor asked for, and those that hold the split.

    separator: what separates the labels of an image; empty if each has one.
    """

    rows: list[Row]
    unused: list[str]
    split: str
    separator: str


def read_table(
    table: Path,
    group: str | None = None,
    labelled: bool = True,
    columns: Sequence[str] = (),
    separator: str | None = None,
) -> Table:
    """Return the rows of a table.

    The columns are named by the first row of CSV (with commas, semicolons, tabs or vertical bars), or by the keys of
    JSON objects. Of two columns, the second name may be any. A list has no names: each line is a path, then a label.
    The split may also be in columns of yes and no, such as is_valid or is_training_image. So may the labels, if no
    column holds them: a column for each. Empty cells and -1 are then unknown.

    Args:
        table: the file, in UTF-8 or UTF-16.
        group: the column of groups. Default: the column `group`, if the table has one.
        labelled: whether each row must have a label.
        columns: further columns that must be there.
        separator: what separates the labels of an image. Default: see `find_separator`.

    Raises:
        UsageError: a column is missing, a row has no path or label, or the file is not a table.
    """
    records = _records(table)
    names = [*dict.fromkeys(chain.from_iterable(cells for _, cells in records))]
    flags = _part_columns(names, _columns_of(names, records, YES | NO))
    places = _find_columns(names, {group, *flags})
    if group is not None:
        places["group"] = group
    used = {*places.values(), *flags, *columns, *OWN}
    one_hot: list[str] = []
    if labelled and "label" not in places:
        marks = _columns_of(names, records, YES | NO | UNKNOWN)
        one_hot = [name for name in marks if name not in used and len(marks) > 1]
    if separator is None:
        separator = find_separator(cells.get(places.get("label", ""), "") for _, cells in records)
    if one_hot:
        counts = {len(_yes(cells, one_hot)) for _, cells in records}
        separator = "|" if separator or counts != {1} else ""
    needed = ["path", "label"] if labelled and not one_hot else ["path"]
    for column in filter(None, [*needed, *columns, group]):
        if column not in places and column not in names:
            raise UsageError(f"{table} {_missing_column(column, names)}")
    rows = []
    for number, cells in records:
        values = {column: cells.get(name, "") for column, name in places.items()}
        for column in needed:
            if values[column].lower() in MISSING and not (column == "label" and separator):
                raise UsageError(f"{table}, row {number} has no {column}")
        split = values.get("split", "").lower()
        values["split"] = PARTS.get(split, split)
        parts = [flags[name] for name in _yes(cells, flags)]
        if len(parts) > 1:
            raise UsageError(f"{table}, row {number} is in {listed(parts)} by its columns {listed(flags)}: leave one")
        if flags:
            values["split"] = parts[0] if parts else ("test" if "train" in flags.values() else "train")
        if one_hot:
            values["label"] = "|".join(_yes(cells, one_hot))
        unknown = [name for name in one_hot if cells.get(name, "") in UNKNOWN]
        unknown += split_labels(cells.get(UNKNOWN_LABELS, ""), "|")
        rows.append(Row(number, cells, **values, unknown=unknown))
    unused = [name for name in names if name not in {*used, *one_hot}]
    return Table(rows, unused, listed(flags or [places.get("split", "split")]), separator)


def _columns_of(names: Iterable[str], records: Sequence[tuple[int, Record]], words: set[str]) -> list[str]:
    """Return the columns that hold nothing but these words."""
    return [name for name in names if {cells.get(name, "").lower() for _, cells in records} <= words]


def _yes(cells: Record, names: Iterable[str]) -> list[str]:
    """Return the columns of yes and no that are yes in a row."""
    return [name for name in names if cells.get(name, "").lower() in YES]


def find_separator(cells: Iterable[str]) -> str:
    """Return what separates the labels in the cells of a column; empty if each cell has one.

    It is a vertical bar or a semicolon; or a comma, if that makes fewer labels than there are different cells, which
    a class such as "oak, red" does not.
    """
    different = {*cells}
    for separator in "|;,":
        labels = {label for cell in different for label in split_labels(cell, separator)}
        if any(separator in cell for cell in different) and (separator != "," or len(labels) < len(different)):
            return separator
    return ""


def split_labels(cell: str, separator: str) -> list[str]:
    """Return the labels in a cell, which may be a list in brackets with its labels in quotes."""
    labels = [label.strip(" '\"") for label in cell.strip("[]").split(separator)]
    return [label for label in labels if label.lower() not in MISSING]


def _part_columns(names: Sequence[str], binary: Iterable[str]) -> dict[str, str]:
    """Return columns such as is_valid, with the part that yes means. binary: columns of yes and no.

    A column of the split has precedence. Without a column of labels, `train` may be a class.
    """
    known = _find_columns(names, names)
    if "split" in known:
        return {}
    prefix = "" if "label" in known else "is"
    flags = [name for name in binary if _plain(name).startswith(prefix)]
    parts = {name: PARTS.get(_plain(name).removeprefix("is").removesuffix("image"), "") for name in flags}
    return {name: part for name, part in parts.items() if part}


def _find_columns(names: Sequence[str], excluded: Container[str | None]) -> dict[str, str]:
    """Return the names of the known columns. excluded: columns that cannot be the second of two."""
    plain = {_plain(name): name for name in reversed(names)}
    places: dict[str, str] = {}
    for column, aliases in COLUMNS.items():
        for alias in aliases.split():
            if alias in plain:
                places.setdefault(column, plain.pop(alias))
    others = [name for name in plain.values() if name not in excluded]
    absent = [column for column in ("path", "label") if column not in places]
    if len(others) == len(absent) == 1:
        places[absent[0]] = others[0]
    return places


def _missing_column(column: str, names: Sequence[str]) -> str:
    """Return what to do about a missing column."""
    fault = f"has no column {column!r}, only {', '.join(names)}"
    if column in COLUMNS:
        accepted = COLUMNS[column].replace(" ", ", ")
        return f"{fault}: its first row must name the columns, and may call this one {accepted}"
    return f"{fault}.{nearest(column, names)}"


def _plain(name: str) -> str:
    """Return the name of a column in the form of `COLUMNS`."""
    return re.sub("[ _-]", "", name.lower())


# ---- Formats.


def _records(table: Path) -> list[tuple[int, Record]]:
    """Return the numbers and cells of the rows. Raise UsageError for a file that is not a table, or has no rows."""
    suffix = table.suffix.lower()
    if suffix not in TABLES:
        formats = ", ".join(TABLES)
        raise UsageError(f"{table} is not a table ({formats}): save a table as CSV, unpack an archive to a folder")
    data = table.read_bytes()
    try:
        text = re.sub("\r\n?", "\n", nfc(data.decode(json.detect_encoding(data))))
    except UnicodeDecodeError:
        raise UsageError(f"{table} is neither UTF-8 nor UTF-16 text: save it as CSV UTF-8") from None
    if suffix in (".jsonl", ".ndjson"):
        records = _objects(text)
    elif suffix == ".txt" and not re.search("[,;\t|]", text.partition("\n")[0]):
        records = _lines(text)
    else:
        records = _csv_rows(text, table)
    rows = [(number, cells) for number, cells in records if any(cells.values())]
    if not rows:
        raise UsageError(f"{table} has no rows below the names of its columns")
    return rows


def _csv_rows(text: str, table: Path) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a CSV or TSV. Columns without a name, such as the index of pandas, are left out."""
    text = re.sub(r'\A\n*("?sep=."?\n+)?', "", text)  # Excel's own line
    first = text.partition("\n")[0]
    delimiter = "\t" if table.suffix.lower() == ".tsv" else max(",;\t|", key=first.count)
    names = next(csv.reader([first], delimiter=delimiter), [])
    if len(names) == 2 and names[0].strip().lower().endswith(IMAGES):
        text = f"path{delimiter}label\n{text}"
    named = [name.strip() for name in names if name]
    if len({*named}) < len(named):
        raise UsageError(f"{table} has two columns with the same name ({first}): rename one")
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(StringIO(text), restval="", delimiter=delimiter)
    for row in reader:
        cells = {}
        for name, cell in row.items():
            if not INDEX.fullmatch(name or ""):
                # An apostrophe keeps spreadsheets from running a cell, see `csv_cell`.
                cells[name.strip()] = re.sub("^'(?=[=+@-])", "", cell.strip())
        yield reader.line_num, cells


def _lines(text: str) -> Iterator[tuple[int, Record]]:
    """Yield the lines of a list: a path, which ends with the suffix of an image or at the first blank; then a label."""
    for number, line in enumerate(text.split("\n"), 1):
        match = re.fullmatch(rf"\s*(.+?(?:{'|'.join(IMAGES)})|\S+)(?:\s+(.+?))?\s*", line, re.IGNORECASE)
        if match:
            yield number, {"path": match[1], "label": match[2] or ""}


def _objects(text: str) -> Iterator[tuple[int, Record]]:
    """Yield the cells of JSON objects, one a line or in an array."""
    texts = text.split("\n")
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            texts = [json.dumps(value) for value in json.loads(text)]
    for number, line in enumerate(texts, 1):
        if line.strip():
            try:
                values = dict(json.loads(line))
            except (TypeError, ValueError):
                raise UsageError(f"row {number} of the table is no JSON object: write one object a line") from None
            yield number, {name: _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, list):
        return "|".join(map(_text, value))
    if isinstance(value, dict):
        return _text(value.get("choices"))  # Label Studio
    if value is None:
        return ""
    return nfc(str(value).strip())


# ---- The images of a table.


def list_table(
    table: Path, group: str | None, skip_bad: bool, columns: Sequence[str] = (), separator: str | None = None
) -> Listing:
    """Return the image files of a table, see `read_table`. Paths are absolute, or relative to the table's folder.

    columns: names of the columns of `Listing.columns`. separator: that of several labels, see `read_table`.

    A split column holds words of `PARTS`, in upper or lower case; without test rows, val is the test set. Without
    the column, test images are drawn.

    Raises:
        UsageError: the table is invalid, or files are missing and not `skip_bad`.
    """
    folder = str(table.parent)
    listed_rows, unused, split, separator = read_table(table, group, columns=columns, separator=separator)
    if unused:
        advice = "--data.groups gives the values of a column results of their own"
        note_once(f"{table}: not used: {', '.join(unused)}; {advice}")
    if split != "split":
        note_once(f"{table}: {split} is read as the split into training, validation and test images")
    found = find_files(table, folder, [row.path for row in listed_rows])
    missing = [row.path for row in listed_rows if row.path not in found]
    if missing and not (skip_bad and found):
        remedy = "To leave them out: --data.skip_bad true" if found else "No image below it has such a name"
        if "://" in missing[0]:
            remedy = "Download them first"
        raise UsageError(
            f"{len(missing):,} of {len(listed_rows):,} images of {table} do not exist: {listed(missing)}; "
            f"paths are relative to {folder}/. {remedy}"
        )
    rows = _unique_rows(table, listed_rows, found, separator)
    if separator and len(rows) < len(listed_rows):
        note_once(f"{table}: {len(listed_rows):,} rows of {len(rows):,} images, whose labels are joined")
    names = {row.label for row in rows.values()}
    for path, row in rows.items():
        whole = re.sub(r"^(-?\d+)\.0+$", r"\1", row.label)  # 1.0 is 1, if both are in the table
        if whole in names:
            rows[path] = row._replace(label=whole)
    labels = _labels(table, rows, separator) if separator else {}
    if labels:
        rows = {path: rows[path] for path in labels}
    keys = sort_classes({row.label for row in rows.values()})
    classes = keys
    if separator:
        classes = sort_classes({name for values in labels.values() for name, value in values.items() if value == 1})
    check_class_names(classes, f"in {table}, the class")
    note_similar_classes(str(table), classes)
    if len(classes) < 2:
        raise UsageError(f"{table} has one class only ({listed(classes)}), a classifier needs two or more")
    used = {row.split for row in rows.values()}
    if used != {""} and not {"train"} < used <= {"train", "val", "test"}:
        words = ", ".join(sorted(map(repr, used)))
        advice = "each row needs train, val or test, and some train; or remove the column to draw test images"
        raise UsageError(f"{table} has {words} in column {split}: {advice}")
    parts: dict[str, Tree] = {}
    for part in ("train", "val", "test", ""):
        if part in used:
            parts[part or "all"] = {name: [] for name in keys}
    files = [file_at(os.path.join(folder, path), path) for path in rows]  # noqa: PTH118
    for file in sorted(files, key=lambda file: (nfc(file.path), file)):
        row = rows[file.path]
        parts[row.split or "all"][row.label].append(file)
    first = next(iter(parts.values()))
    untrained = [name for name, members in first.items() if not members]
    if labels:
        trained = Listing("", {"train": first}, labels=labels).classes
        untrained = [name for name in classes if name not in trained]
    if untrained:
        raise UsageError(f"{table} has no training images of class {listed(untrained)}: add some, or remove the class")
    groups = {path: row.group for path, row in rows.items() if row.group}
    by_column = {name: {path: row.cells.get(name, "") for path, row in rows.items()} for name in columns}
    return Listing(f"of {table}", parts, groups, by_column, labels)


def _labels(table: Path, rows: Mapping[str, Row], separator: str) -> dict[str, dict[str, float]]:
    """Return the labels of images with several labels by path, as in `Listing`, and report what is unusual.

    Images of which no label is known are left out.
    """
    labels = {}
    counts: Counter[str] = Counter()
    for path, row in rows.items():
        given = split_labels(row.label, separator)
        labels[path] = {**dict.fromkeys(row.unknown, -1.0), **dict.fromkeys(given, 1.0)}
        counts.update(given)
    known = {path: values for path, values in labels.items() if any(values.get(name) != -1 for name in counts)}
    if len(known) < len(labels):
        note_once(f"{table}: {counted(len(labels) - len(known), 'image')} left out, of which no label is known")
    labels = known
    note_once(f"{table}: an image has several of {counted(len(counts), 'label')}, or none")
    none = sum(1.0 not in values.values() for values in labels.values())
    if none:
        note_once(f"{table}: {counted(none, 'image')} with none of the labels")
    few = [name for name, count in counts.items() if count < FEW_IMAGES]
    if few:
        note_once(f"{table}: too few images for all parts have the labels {listed(few)}: add more")
    return labels


def _unique_rows(table: Path, listed_rows: Iterable[Row], found: Mapping[str, str], separator: str) -> dict[str, Row]:
    """Return the rows by the paths of their files. With a separator, the labels in rows of the same file are joined.

    found: files by the paths in the table. Raise UsageError if rows contradict each other.
    """
    rows: dict[str, Row] = {}
    part_of_group: dict[str, str] = {}
    for row in listed_rows:
        path = found.get(row.path, row.path)
        above = rows.setdefault(path, row)
        if separator and row is not above:
            labels = [*split_labels(above.label, separator), *split_labels(row.label, separator)]
            rows[path] = above._replace(label=separator.join(labels), unknown=[*above.unknown, *row.unknown])
            row = row._replace(label=above.label)
        fault = ""
        if row.group and part_of_group.setdefault(row.group, row.split) != row.split:
            fault = f"group {row.group!r} is in {part_of_group[row.group]} and in {row.split}: leave it in one"
        for column in ("label", "split", "group"):
            before, here = getattr(above, column), getattr(row, column)
            if before != here:
                fault = f"{path} has the {column} {here!r}, and {before!r} in a row above: keep one row"
                if column == "label":
                    fault += ', or join their labels with --data.separator "|"'
        if fault:
            raise UsageError(f"{table}, row {row.number}: {fault}")
    return rows


# ---- From paths in a table to files.


def find_files(table: Path, folder: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the files that paths of a table name, by the paths. Missing files are left out.

    Backslashes, and accents in another Unicode form, are accepted. Other paths may differ in the case of letters, or be
    the end of the path of an image below `folder`: 0001 may be train/0001.jpg. If no path has a file, the longest end
    of all paths that fits is searched: C:\\pets\\cat\\1.jpg may be cat/1.JPG. Training images have precedence.
    """
    files: dict[str, str] = {}
    wanted: dict[str, list[str]] = {}  # parts of the other paths
    for path in dict.fromkeys(paths):
        plain = os.path.normpath(path.replace("\\", "/"))
        place = as_on_disk(plain, folder)
        if os.path.lexists(place):
            files[path] = place if os.path.isabs(plain) else os.path.relpath(place, folder)  # noqa: PTH117
        else:  # Label Studio writes /data/local-files/?d=PATH
            wanted[path] = unquote(plain.rpartition("?d=")[2]).casefold().split("/")
    if not wanted:
        return files
    endings = _files_by_ending(folder)
    longest = max(map(len, wanted.values()))
    # A folder in common keeps a missing image from being replaced by one of the same name.
    for start in range(max(1, longest - 1) if files else longest):
        found = {}
        for path, parts in wanted.items():
            fits = _fitting(endings, "/".join(parts[start:]))
            if len(fits) > 1:
                fits = [file for file in fits if "train" in map(part_of, file.split("/")[:-1])] or fits
            if len(fits) > 1:
                raise UsageError(f"{table}: {path} may be {fits[0]} or {fits[1]}: write paths relative to {folder}")
            if fits:
                found[path] = fits[0]
        if found:
            name, file = next(iter(found.items()))
            note_once(f"{table}: images are found by their names, such as {name} as {file}")
            return files | found
    return files


def _fitting(endings: Mapping[str, list[str]], path: str) -> list[str]:
    """Return the files with the end of a path, else those with another suffix, or without Label Studio's prefix."""
    for name in (path, re.sub(r"[.]\w+$", "", path), re.sub(r"(^|/)[0-9a-f]{8}-([^/]+)$", r"\1\2", path)):
        if name in endings:
            return endings[name]
    return []


def _files_by_ending(folder: str) -> dict[str, list[str]]:
    """Return the images below a folder by all endings of their paths in lower case, with and without suffix."""
    endings: dict[str, list[str]] = {}
    for entry in walk(folder, lambda error: None):
        if entry.name.lower().endswith(IMAGES):
            file = Path(entry.path).relative_to(folder).as_posix()
            names = nfc(file).casefold().split("/")
            for start in range(len(names)):
                ending = "/".join(names[start:])
                endings.setdefault(ending, []).append(file)
                endings.setdefault(ending.rpartition(".")[0], []).append(file)
    return endings


def table_hint(folder: Path) -> str:
    """Return a remark about the table below a folder with most labels, or why none is read; empty without one."""
    hint, most = "", 0
    for entry in walk(str(folder), lambda error: None):
        if entry.name.lower().endswith((*TABLES[:-1], ".json", ".xlsx", ".parquet", ".gz")):  # a .txt may be anything
            try:
                rows = read_table(Path(entry.path)).rows
            except UsageError as error:
                hint = hint or f" ({error})"
                continue
            if len(rows) > most and len({row.label for row in rows}) > 1:
                hint, most = f" (did you mean --data-dir {entry.path}?)", len(rows)
    return hint


def with_reviewed_labels(images: ImageSet, table: Path) -> ImageSet:
    """Return training images with the labels and the split of a table. Images without a row are left out.

    Args:
        images: training images of a data set.
        table: the table, see `read_table`. The column `image` holds the row of an image. Rows with the split `val`
            become `val_rows`, at the end of the set.

    Raises:
        UsageError: a row has an unknown class, image or split, or repeats an image.
    """
    rows = sorted(read_table(table).rows, key=lambda row: row.split == "val")
    labels: dict[int, int] = {}  # by image
    for row in rows:
        image = int(row.path) if row.path.isdecimal() else len(images)
        fault = ""
        if row.label not in images.classes:
            fault = f"the data set has no class {row.label!r}.{nearest(row.label, images.classes)}"
        elif row.split not in ("", "train", "val"):
            fault = f"the split {row.split!r} is neither train nor val"
        elif image >= len(images):
            fault = f"the data set has no image {row.path}"
        elif image in labels:
            fault = f"image {image} is in another row"
        if fault:
            raise UsageError(f"{table}, row {row.number}: {fault}")
        labels[image] = images.classes.index(row.label)
    return replace(
        images,
        images=images.images[[*labels]],
        labels=torch.tensor([*labels.values()]),
        val_rows=range(sum(row.split != "val" for row in rows), len(rows)) or None,
        groups=None,
        mapped=False,
        names=[*map(str, labels)],
    )
