"""The image files that a table lists, found as the disk spells them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cifar_lit.data.cache import File
from cifar_lit.data.decode import SUFFIXES
from cifar_lit.data.image_set import check_class_names
from cifar_lit.data.layout import Listing, Tree, sort_classes
from cifar_lit.data.progress import note_once
from cifar_lit.data.table import Row, read_table
from cifar_lit.data.walk import as_on_disk, is_folder, walk
from cifar_lit.errors import UsageError, nearest
from cifar_lit.text import listed, nfc

# Parts by their names in tables.
PARTS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


class Found(NamedTuple):
    """Files of a table. `paths` has an entry for each row; missing files have the path of the table.

    `fault` says why names fit several files, or is empty.
    """

    paths: list[str]
    missing: list[str]
    fault: str


def list_table(table: Path, group: str | None, skip_bad: bool) -> Listing:
    """Return the image files of a table, see `read_table`. Paths are absolute, or relative to the table's folder.

    A split column holds words of `PARTS`, in upper or lower case; without test rows, val is also the test set. Without
    the column, test images are drawn.

    Raises:
        UsageError: the table is invalid, or files are missing and not `skip_bad`.
    """
    folder = str(table.parent)
    listed_rows = list(read_table(table, group))
    found = find_files(table, [row.path for row in listed_rows])
    if found.fault or len(found.missing) == len({row.path for row in listed_rows}):
        raise UsageError(f"{table}: {found.fault or _why_missing(found.missing, folder)}")
    if found.missing and not skip_bad:
        raise UsageError(
            f"{len(found.missing):,} of {len(listed_rows):,} images of {table} do not exist: "
            f"{listed(path[:200] for path in found.missing)}; paths are relative to {folder}/. "
            "To leave them out: --data.skip_bad true"
        )
    rows: dict[str, tuple[str, str, str]] = {}  # label, part and group by path
    same_files: dict[str, str] = {}  # path by the absolute path
    part_of_group: dict[str, str] = {}
    repeated = 0
    for row, path in zip(listed_rows, found.paths, strict=True):
        part = PARTS.get(row.split.lower(), "none") if row.split else ""
        path = same_files.setdefault(os.path.abspath(os.path.join(folder, path)), path)  # noqa: PTH100, PTH118
        fault = ""
        if part == "none":
            fault = f"split {row.split[:80]!r} is none of {', '.join(PARTS)}.{nearest(row.split[:80], PARTS)}"
        elif path in rows:
            repeated += 1
            values = zip(("label", "split", "group"), rows[path], (row.label, part, row.group), strict=True)
            for column, above, here in values:
                if above != here:
                    fault = f"{path[:200]} has the {column} {here[:80]!r}, and {above[:80]!r} in a row above"
        elif rows and bool(part) != bool(next(iter(rows.values()))[1]):
            fault = "some rows have a split, others none: give each one, or leave the column out"
        elif row.group and part_of_group.setdefault(row.group, part) != part:
            fault = f"group {row.group[:80]!r} is in {part_of_group[row.group]} and in {part}: leave it in one"
        else:
            rows[path] = row.label, part, row.group
        if fault:
            raise UsageError(f"{table}, row {row.number}: {fault}")

    if repeated:
        note_once(f"{table}: {repeated:,} rows repeat an earlier row, and count once")
    return _listing(table, rows)


def _listing(table: Path, rows: dict[str, tuple[str, str, str]]) -> Listing:
    """Return the files of rows (label, part and group by path) by part and class."""
    names = {label for label, _, _ in rows.values()}
    check_class_names(sorted(names), f"in {table}, the class")
    classes = sort_classes(names)
    if len(classes) == 1:
        raise UsageError(f"{table} has one class only ({classes[0]}), a classifier needs two or more")
    used = {part for _, part, _ in rows.values()}
    if "" not in used and ("train" not in used or len(used) == 1):
        absent = "val or test" if "train" in used else "train"
        raise UsageError(f"{table} has no {absent} rows: add some, or remove the split column to draw test images")
    parts: dict[str, Tree] = {
        part or "all": {name: [] for name in classes} for part in ("train", "val", "test", "") if part in used
    }
    for file in sorted(_files(table.parent, rows), key=lambda file: (nfc(file.path), file)):
        label, part, _ = rows[file.path]
        parts[part or "all"][label].append(file)
    untrained = [name for name, members in next(iter(parts.values())).items() if not members]
    if untrained:
        raise UsageError(f"{table} has no training images of class {listed(untrained)}: add some, or remove the class")
    return Listing(parts, {path: name for path, (_, _, name) in rows.items() if name})


def _files(folder: Path, paths: Iterable[str]) -> Iterator[File]:
    for path in paths:
        try:
            status = os.stat(os.path.join(folder, path))  # noqa: PTH116, PTH118 (faster than Path for many files)
            yield File(path, status.st_size, status.st_mtime_ns)
        except OSError:
            yield File(path, 0, 0)  # decoding reports it as missing


# ---- From paths in a table to files.


def find_files(table: Path, paths: Sequence[str]) -> Found:
    """Return the files that the rows of a table name.

    Backslashes, accents in another Unicode form and a repeated name of the table's folder are accepted. If no row names
    a file like that, the folders below the table are searched: "0001" and "0001.jpg" then name train/0001.jpg, unless
    another folder has that file too.

    Args:
        table: the table. Relative paths are relative to its folder.
        paths: path of each row.
    """
    folder = table.parent
    unique = dict.fromkeys(paths)
    files = {path: file for path in unique if (file := _existing(folder, path)) is not None}
    fault = ""
    if not files:
        files, fault = _search(folder, [*unique])
        if files:
            name, file = next(iter(files.items()))
            note_once(f"{table}: images are found by their names, such as {name} as {file}")
    missing = [path for path in unique if path not in files]
    return Found([files.get(path, path) for path in paths], missing, fault)


def _existing(folder: Path, path: str) -> str | None:
    """Return the path of a row as the disk spells it, relative to `folder` if the row's is; None without a file."""
    forward = path.replace("\\", "/").removeprefix("./")
    first, _, rest = forward.partition("/")
    spellings = [os.path.normpath(path), path, os.path.normpath(forward)]
    if first == folder.absolute().name:
        spellings.append(rest)
    for spelling in spellings:
        place = as_on_disk(os.path.join(folder, spelling))  # noqa: PTH118
        if os.path.lexists(place):
            return place if os.path.isabs(spelling) else place[len(os.path.join(folder, "")) :]  # noqa: PTH117, PTH118
    return None


def _search(folder: Path, paths: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the files below `folder` by paths that end like them, with or without suffix, and a fault.

    Each path has to fit one file, or all paths one file in the same folder.
    """
    files: dict[str, list[str]] = {}  # paths below the folder, by the name without suffix in lower case
    for entry in walk(str(folder), lambda error: None):
        if entry.name.lower().endswith(SUFFIXES) and not is_folder(entry):
            files.setdefault(_stem(entry.name), []).append(os.path.relpath(entry.path, folder).replace(os.sep, "/"))
    fits: dict[str, dict[str, list[str]]] = {}  # for each path, files by the folder that has to be put before it
    for path in paths:
        wanted = nfc(path.replace("\\", "/").removeprefix("./")).lower()
        for file in files.get(_stem(wanted.rpartition("/")[2]), ()):
            spelled = nfc(file).lower()
            ending = wanted if wanted.endswith(SUFFIXES) else wanted + spelled[len(_stem(spelled)) :]
            if f"/{spelled}".endswith(f"/{ending}"):
                fits.setdefault(path, {}).setdefault(spelled[: -len(ending)], []).append(file)
    if not fits:
        return {}, ""
    single = {path: next(iter(by.values()))[0] for path, by in fits.items() if sum(map(len, by.values())) == 1}
    if len(single) == len(fits):
        return single, ""
    common = set.intersection(*(set(by) for by in fits.values()))
    if len(common) == 1:
        (prefix,) = common
        if all(len(by[prefix]) == 1 for by in fits.values()):
            return {path: by[prefix][0] for path, by in fits.items()}, ""
    path = next(path for path in fits if path not in single)
    choices = [file for same in fits[path].values() for file in same]
    return {}, f"{path[:200]} may be {' or '.join(choices[:2])}: write the paths relative to {folder}/"


def _stem(name: str) -> str:
    """Return a name without the suffix of an image, composed and in lower case."""
    name = nfc(name).lower()
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _why_missing(paths: Sequence[str], folder: str) -> str:
    """Return why none of the paths of a table has a file, and what to do."""
    what = f"none of its {len(paths):,} images exists ({listed(path[:200] for path in paths)})"
    if re.match("(?i)(https?|s3|gs)://", paths[0]):
        return f"{what}: these are addresses; download the images, and list their files"
    if re.match(r"([A-Za-z]:)?[\\/]", paths[0]):
        return f"{what}: the paths are absolute; write them relative to {folder}/"
    return f"{what}: paths are relative to {folder}/, and no image below it has one of these names"


def table_paths(table: Path, rows: Sequence[Row]) -> list[str]:
    """Return the absolute, normalised path of each row."""
    found = find_files(table, [row.path for row in rows])
    if found.fault:
        raise UsageError(f"{table}: {found.fault}")
    return [os.path.normpath(os.path.join(table.absolute().parent, path)) for path in found.paths]  # noqa: PTH118
