"""The image files that a table lists, found as the disk spells them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.files import as_on_disk
from cifar_lit.base.text import listed, nfc
from cifar_lit.data.image_set import check_class_names
from cifar_lit.data.photos.cache import file_at
from cifar_lit.data.photos.formats import IMAGES
from cifar_lit.data.photos.layout import PARTS, Listing, Tree, sort_classes
from cifar_lit.data.photos.table import Row, read_table
from cifar_lit.data.photos.walk import walk
from cifar_lit.data.progress import note_once


def list_table(table: Path, group: str | None, skip_bad: bool, columns: Sequence[str] = ()) -> Listing:
    """Return the image files of a table, see `read_table`. Paths are absolute, or relative to the table's folder.

    columns: names of the columns of `Listing.columns`.

    A split column holds words of `PARTS`, in upper or lower case; without test rows, val is also the test set. Without
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
    rows: dict[str, Row] = {}  # by path; `split` is the part
    same_files: dict[str, str] = {}  # path by the absolute path
    part_of_group: dict[str, str] = {}
    for row in listed_rows:
        path = found.get(row.path, row.path)
        path = same_files.setdefault(os.path.abspath(os.path.join(folder, path)), path)  # noqa: PTH100, PTH118
        part = PARTS.get(row.split.lower(), "")
        fault = ""
        if row.split and not part:
            fault = f"split {row.split!r} is none of {', '.join(PARTS)}.{nearest(row.split, PARTS)}"
        row = row._replace(split=part)
        above = rows.setdefault(path, row)
        if bool(part) != bool(next(iter(rows.values())).split):
            fault = "some rows have a split, others none: give each one, or leave the column out"
        elif row.group and part_of_group.setdefault(row.group, part) != part:
            fault = f"group {row.group!r} is in {part_of_group[row.group]} and in {part}: leave it in one"
        for column in ("label", "split", "group"):
            before, here = getattr(above, column), getattr(row, column)
            if before != here:
                fault = f"{path} has the {column} {here!r}, and {before!r} in a row above"
        if fault:
            raise UsageError(f"{table}, row {row.number}: {fault}")
    names = {row.label for row in rows.values()}
    check_class_names(sorted(names), f"in {table}, the class")
    classes = sort_classes(names)
    if len(classes) == 1:
        raise UsageError(f"{table} has one class only ({classes[0]}), a classifier needs two or more")
    used = {row.split or "all" for row in rows.values()}
    is_complete = {"train"} < used  # with val or test
    if "all" not in used and not is_complete:
        absent = "val or test" if "train" in used else "train"
        raise UsageError(f"{table} has no {absent} rows: add some, or remove the split column to draw test images")
    parts: dict[str, Tree] = {
        part: {name: [] for name in classes} for part in ("train", "val", "test", "all") if part in used
    }
    files = [file_at(os.path.join(folder, path), path) for path in rows]  # noqa: PTH118
    for file in sorted(files, key=lambda file: (nfc(file.path), file)):
        row = rows[file.path]
        parts[row.split or "all"][row.label].append(file)
    untrained = [name for name, members in next(iter(parts.values())).items() if not members]
    if untrained:
        raise UsageError(f"{table} has no training images of class {listed(untrained)}: add some, or remove the class")
    groups = {path: row.group for path, row in rows.items() if row.group}
    by_column = {}
    for place, column in enumerate(columns):
        by_column[column] = {path: row.values[place] for path, row in rows.items()}
    return Listing(parts, groups, by_column)


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
