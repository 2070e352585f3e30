"""Read a table of own images: CSV, TSV or JSON lines with one image per row, and columns under their usual names."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.files import as_on_disk
from cifar_lit.base.text import listed, nfc, note_once
from cifar_lit.data.image_set import ImageSet, check_class_names
from cifar_lit.data.photos.decode import IMAGES, Preparation, decode
from cifar_lit.data.photos.layout import PARTS, Listing, Tree, file_at, note_similar_classes, sort_classes, walk

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


def list_table(table: Path, group: str | None, skip_bad: bool, columns: Sequence[str] = ()) -> Listing:
    """Return the image files of a table, see `read_table`. Paths are absolute, or relative to the table's folder.

    columns: names of the columns of `Listing.columns`.

    A split column holds words of `PARTS`, in upper or lower case; without test rows, val is the test set. Without
    the column, test images are drawn.

    Raises:
        UsageError: the table is invalid, or files are missing and not `skip_bad`.
    """
    folder = str(table.parent)
    listed_rows = list(read_table(table, group, columns=columns))
    found = find_files(table, folder, [row.path for row in listed_rows])
    missing = [path for path in dict.fromkeys(row.path for row in listed_rows) if path not in found]
    if missing and not (skip_bad and found):
        remedy = "To leave them out: --data.skip_bad true" if found else "No image below it has such a name"
        raise UsageError(
            f"{len(missing):,} of {len(listed_rows):,} images of {table} do not exist: {listed(missing)}; "
            f"paths are relative to {folder}/. {remedy}"
        )
    rows = _unique_rows(table, listed_rows, found)
    names = {row.label for row in rows.values()}
    check_class_names(sorted(names), f"in {table}, the class")
    classes = sort_classes(names)
    note_similar_classes(str(table), classes)
    if len(classes) == 1:
        raise UsageError(f"{table} has one class only ({classes[0]}), a classifier needs two or more")
    used = {row.split for row in rows.values()}
    if used in ({"train"}, {"val"}, {"test"}, {"val", "test"}):
        absent = "val or test" if "train" in used else "train"
        raise UsageError(f"{table} has no {absent} rows: add some, or remove the split column to draw test images")
    parts: dict[str, Tree] = {}
    for part in ("train", "val", "test", "all"):
        if part in used:
            parts[part] = {name: [] for name in classes}
    files = [file_at(os.path.join(folder, path), path) for path in rows]  # noqa: PTH118
    for file in sorted(files, key=lambda file: (nfc(file.path), file)):
        row = rows[file.path]
        parts[row.split][row.label].append(file)
    untrained = [name for name, members in next(iter(parts.values())).items() if not members]
    if untrained:
        raise UsageError(f"{table} has no training images of class {listed(untrained)}: add some, or remove the class")
    groups = {path: row.group for path, row in rows.items() if row.group}
    by_column = {}
    for place, column in enumerate(columns):
        by_column[column] = {path: row.values[place] for path, row in rows.items()}
    return Listing(f"of {table}", parts, groups, by_column)


def _unique_rows(table: Path, listed_rows: Iterable[Row], found: Mapping[str, str]) -> dict[str, Row]:
    """Return the rows by the paths of their files, with `all` or a part of `PARTS` as split.

    found: files by the paths in the table. Raise UsageError if rows contradict each other.
    """
    rows: dict[str, Row] = {}
    same_files: dict[str, str] = {}  # path by the absolute path
    part_of_group: dict[str, str] = {}
    for row in listed_rows:
        path = found.get(row.path, row.path)
        path = same_files.setdefault(os.path.abspath(os.path.join(table.parent, path)), path)  # noqa: PTH100, PTH118
        part = PARTS.get(row.split.lower(), "all")
        fault = ""
        if row.split and part == "all":
            fault = f"split {row.split!r} is none of {', '.join(PARTS)}.{nearest(row.split, PARTS)}"
        row = row._replace(split=part)
        above = rows.setdefault(path, row)
        first = next(iter(rows.values()))
        if (part == "all") != (first.split == "all"):
            fault = "some rows have a split, others none: give each one, or leave the column out"
        elif row.group and part_of_group.setdefault(row.group, part) != part:
            fault = f"group {row.group!r} is in {part_of_group[row.group]} and in {part}: leave it in one"
        for column in ("label", "split", "group"):
            before, here = getattr(above, column), getattr(row, column)
            if before != here:
                fault = f"{path} has the {column} {here!r}, and {before!r} in a row above"
        if fault:
            raise UsageError(f"{table}, row {row.number}: {fault}")
    return rows


# ---- From paths in a table to files.


def find_files(table: Path, folder: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the files that paths of a table name, by the paths. Missing files are left out.

    Backslashes, and accents in another Unicode form, are accepted. If no path has a file, the folders below `folder`
    are searched: "0001" and "0001.jpg" may then be train/0001.jpg.
    """
    unique = dict.fromkeys(paths)
    files: dict[str, str] = {}
    for path in unique:
        for spelling in (os.path.normpath(path.replace("\\", "/")), path):
            place = as_on_disk(spelling, folder)
            if os.path.lexists(place):
                files[path] = place if os.path.isabs(spelling) else os.path.relpath(place, folder)  # noqa: PTH117
                break
    if files:
        return files
    endings = _files_by_ending(folder)
    for path in unique:
        fits = endings.get(nfc(path.replace("\\", "/")), [])
        if len(fits) > 1:
            raise UsageError(f"{table}: {path} may be {fits[0]} or {fits[1]}: write paths relative to {folder}")
        if fits:
            files[path] = fits[0]
    if files:
        name, file = next(iter(files.items()))
        note_once(f"{table}: images are found by their names, such as {name} as {file}")
    return files


def _files_by_ending(folder: str) -> dict[str, list[str]]:
    """Return the images below a folder by all endings of their paths, with and without suffix."""
    endings: dict[str, list[str]] = {}
    for entry in walk(folder, lambda error: None):
        if entry.name.lower().endswith(IMAGES):
            file = os.path.relpath(entry.path, folder).replace(os.sep, "/")
            names = nfc(file).split("/")
            for start in range(len(names)):
                ending = "/".join(names[start:])
                endings.setdefault(ending, []).append(file)
                endings.setdefault(os.path.splitext(ending)[0], []).append(file)  # noqa: PTH122
    return endings


def with_reviewed_labels(images: ImageSet, table: Path) -> ImageSet:
    """Return training images with the labels and the split of a table. Images without a row are left out.

    Args:
        images: training images of a data set.
        table: the table, see `read_table`. The column `image` holds the row of an image, or the file of a new one. Rows
            with the split `val` become `val_rows`, at the end of the set.

    Raises:
        UsageError: a row has an unknown class, image or split, or repeats an image.
        DecodeError: a file cannot be read.
    """
    height, width, channels = images.images.shape[1:]
    files: list[torch.Tensor] = []
    parts: dict[str, dict[str, tuple[int, int]]] = {"train": {}, "val": {}}  # place and label by image
    for number, image, label, split, *_ in read_table(table):
        is_row = image.isdecimal()
        key = str(int(image)) if is_row else os.path.normpath(image)  # 7 and 07 are the same row
        fault = ""
        if label not in images.classes:
            fault = f"the data set has no class {label!r}.{nearest(label, images.classes)}"
        elif split not in ("", *parts):
            fault = f"the split {split!r} is neither train nor val"
        elif key in parts["train"] or key in parts["val"]:
            fault = f"image {key} is in a row above"
        if fault:
            raise UsageError(f"{table}, row {number}: {fault}")
        place = int(image) if is_row else len(images) + len(files)
        if not is_row:
            file = as_on_disk(key, str(table.parent))
            files.append(torch.from_numpy(decode(file, Preparation((height, width), channels))))
        parts[split or "train"][key] = place, images.classes.index(label)
    rows = {**parts["train"], **parts["val"]}
    places, labels = torch.tensor([*rows.values()]).T.contiguous()
    pixels = torch.cat([images.images, torch.stack(files)]) if files else images.images
    val = range(len(parts["train"]), len(rows)) if parts["val"] else None
    names = [name if name.isdecimal() else str((table.parent / name).absolute()) for name in rows]
    return replace(images, images=pixels[places], labels=labels, val_rows=val, groups=None, mapped=False, names=names)
