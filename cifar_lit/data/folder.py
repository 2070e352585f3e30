"""Own images: `ROOT/train/<class>/…` and `ROOT/test/<class>/…`, `ROOT/<class>/…` split by seed, or a table of files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from cifar_lit.data.cache import Duplicates, File, decoded
from cifar_lit.data.decode import HEIC_SUFFIXES, MISSING, SUFFIXES, is_folder, visible_entries, walk
from cifar_lit.data.image_set import ImageSet, check_class_names, image_key
from cifar_lit.data.image_size import parse_image_size
from cifar_lit.data.progress import note_once
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.data.splits import draw_rows, group_files
from cifar_lit.data.table import SUFFIXES as TABLES
from cifar_lit.data.table import read_table
from cifar_lit.errors import Failure, UsageError, nearest
from cifar_lit.text import counted

KINDS = "JPEG, PNG, WebP, BMP or GIF"
HEIC_REMEDY = "convert HEIC photos to JPEG first, such as with `magick mogrify -format jpg *.heic`"
LAYOUT = "ROOT/train/<class>/… and ROOT/test/<class>/…, or ROOT/<class>/…"
# Parts by their names in tables.
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

Tree = dict[str, list[File]]  # the sorted files of each class, in label order


@dataclass(frozen=True)
class Listing:
    """The image files of a data set.

    parts: train, then val and test if they exist; or only `all`, from which test images are drawn. All parts have the
        same classes. Classes may be empty except in train.
    groups: group by path, for files that must be on the same side of a split.
    """

    parts: dict[str, Tree]
    groups: Mapping[str, str] = field(default_factory=dict)


def folder(settings: SourceSettings, train: bool) -> ImageSet:
    """Return the training or test images of a folder or a table, see `list_table`.

    Classes are the names of the class folders, see `sort_classes`. Their subfolders are searched too. Hidden files are
    ignored. The images of ROOT/val or ROOT/valid follow the images of ROOT/train, as `val_rows`; without ROOT/test they
    are also the test images. Images are memory-mapped from the cache, so they may exceed the memory.

    A split drawn by seed keeps near-duplicates on one side. For a split given by folders or a table, a note reports
    near-duplicates across its sides.

    Args:
        settings: `root` is the folder or table. Without train/ and test/, a fraction `test_size` of each class is drawn
            for testing. The draw depends on `split_seed`, the paths below ROOT, groups and near-duplicates. None draws
            no test images.
        train: whether to return the training images.

    Raises:
        UsageError: the settings are invalid, or the folder or table has another layout.
        Failure: images are damaged (unless `skip_bad`), or the disk is full.
    """
    if settings.root is None:
        layout = "a table, or a folder with train/<class>/… and test/<class>/…"
        raise UsageError(f"the data set `folder` needs --data-dir PATH: {layout}")
    root, test_size, channels = settings.path, settings.test_size, settings.channels or 3
    if test_size is not None and not 0 < test_size < 1:
        raise UsageError(f"--data.test_size must be between 0 and 1, not {test_size}")
    size = None if settings.image_size is None else parse_image_size(settings.image_size)
    if channels not in (1, 3):
        raise UsageError(f"folder has 1 or 3 channels, not {channels}.")
    is_table = root.suffix.lower() in TABLES and root.exists() and not root.is_dir()
    if settings.group is not None and not is_table:
        raise UsageError(f"data.group names a column of a table, but {root} is not a table: list the images in a table")
    listing = list_table(root, settings.group, settings.skip_bad) if is_table else scan(root)
    if settings.only is not None:
        listing = keep_only(listing, settings.only, root)
    where = f"of {root}" if is_table else f"below {root}"
    classes = tuple(next(iter(listing.parts.values())))
    if settings.num_classes not in (None, len(classes)):
        raise UsageError(f"{root} has {len(classes)} classes, not {settings.num_classes}: leave data.num_classes out")

    def parts_by(duplicates: Duplicates) -> dict[str, Tree]:
        if "all" not in listing.parts:
            return listing.parts
        if test_size is None:
            return {"train": listing.parts["all"]}
        return draw_test(listing.parts["all"], listing.groups, duplicates, test_size, settings.split_seed, where)

    parts = parts_by([])
    files = files_of(parts)

    def arrange(duplicates: Duplicates) -> list[File]:
        return files_of(parts_by(duplicates)) if duplicates else files

    images, bad, duplicates = decoded(root, files, arrange, size, channels, settings.resize, settings.cache_path)
    if bad and not settings.skip_bad:
        faults = f"{len(bad):,} of {len(files):,} images {where} are {_fault(bad)}: {_listed(bad)}"
        raise Failure(f"{faults}; repair or remove them, or leave them out with --data.skip_bad true")
    if duplicates:
        parts = parts_by(duplicates)
        _report_duplicates(parts, duplicates, where)

    if train and test_size is not None and len(parts) > 1 and "test" not in parts:
        note_once(
            f"{root}: no test images except the validation images, which also select the best epoch. "
            "The test score may be too high; --folds 5 tests on separate images"
        )
    used = [part for part in parts if part != "test"] if train else [*parts][-1:]
    labels: dict[str, list[int]] = {}
    for part, tree in parts.items():
        skipped = {file.path: bad[file.path] for members in tree.values() for file in members if file.path in bad}
        for name, members in tree.items():
            if members and all(file.path in skipped for file in members):
                raise Failure(f"no {part} image of class {name} {where} can be read: {_listed(bad)}")
        labels[part] = [
            label for label, members in enumerate(tree.values()) for file in members if file.path not in bad
        ]
        if skipped and part in used:
            total = f"{sum(map(len, tree.values())):,} {part} images {where}"
            note_once(f"{len(skipped):,} of {total} are {_fault(skipped)} and left out: {_listed(skipped)}")
    used_labels = torch.tensor([label for part in used for label in labels[part]], dtype=torch.int64)
    count = len(used_labels)
    pixels = torch.from_numpy(images[:count] if train else images[len(images) - count :])
    val_rows = range(len(labels["train"]), count) if train and len(used) > 1 else None
    paths = [file.path for file in files_of({part: parts[part] for part in used}) if file.path not in bad]
    groups = group_files(paths, listing.groups, duplicates)
    group_rows = None if groups is None else torch.from_numpy(groups)
    return ImageSet(pixels, used_labels, classes, val_rows, mapped=True, groups=group_rows, names=paths, skipped=[*bad])


def files_of(parts: Mapping[str, Tree]) -> list[File]:
    """Return the files of parts in the order of their rows."""
    return [file for tree in parts.values() for members in tree.values() for file in members]


def draw_test(
    tree: Tree, groups: Mapping[str, str], duplicates: Duplicates, test_size: float, split_seed: int, where: str
) -> dict[str, Tree]:
    """Split `tree` into train and test. `test_size` of each class is drawn; groups and near-duplicates stay together.

    Raise UsageError if no image can be spared for testing.
    """
    files = files_of({"all": tree})
    counts = np.array([len(members) for members in tree.values()])
    labels = np.repeat(np.arange(len(counts)), counts)
    # The order by hash is the same with every library and on every machine.
    digests = [sha256(os.fsencode(f"{split_seed}/{file.path}")).digest() for file in files]
    order = np.empty(len(files), np.int64)
    order[sorted(range(len(files)), key=digests.__getitem__)] = np.arange(len(files))
    # A class with two or more images has at least one image on each side.
    sizes = np.array([min(max(round(count * test_size), 1), count - 1) for count in counts.tolist()])
    tests = draw_rows(labels, sizes, order, group_files([file.path for file in files], groups, duplicates))
    if not tests.any():
        raise UsageError(f"every class {where} has only one image or group, so no test images can be drawn: add images")
    parts: dict[str, Tree] = {part: {name: [] for name in tree} for part in ("train", "test")}
    names = [*tree]
    for file, label, test in zip(files, labels.tolist(), tests.tolist(), strict=True):
        parts["test" if test else "train"][names[label]].append(file)
    return parts


def _report_duplicates(parts: Mapping[str, Tree], duplicates: Duplicates, where: str) -> None:
    """Report the number of near-duplicates, or of held-out images that are near-duplicates of training images."""
    part_of = {file.path: part for part, tree in parts.items() for members in tree.values() for file in members}
    across: list[tuple[str, str]] = []
    for paths in duplicates:
        trained = [path for path in paths if part_of.get(path) == "train"]
        across += [(path, trained[0]) for path in paths if trained and part_of.get(path, "train") != "train"]
    kind = "near-duplicates (the same except for scaling, encoding, a slight crop or brightness)"
    if across:
        example = f"such as {across[0][0]} of {across[0][1]}"
        note_once(
            f"{len(across):,} held-out images {where} are {kind} of training images, {example}: scores will be too high"
        )
    else:
        count = f"{sum(map(len, duplicates)):,} of {len(part_of):,} images {where}"
        note_once(f"{count} are {kind} of each other: they are kept on one side of a split")


def scan(root: Path) -> Listing:
    """Return the image files below a folder. Raise UsageError if `root` lacks the layout of a data set."""
    if not root.is_dir():
        wrong = "is a file, not a folder; unpack it first" if root.exists() else "does not exist"
        raise UsageError(f"{root} {wrong}: --data-dir must name a folder with {LAYOUT}")
    ignored: list[str] = []
    folders = {entry.name: entry for entry in visible_entries(str(root), _unreadable) if is_folder(entry)}
    others = [name for name in folders if name not in ("train", "test")]
    parts_here = [name for name in ("train", "test") if name in folders]
    if others:  # train and test may be classes too
        parts_here = [name for name in parts_here if _has_subfolders(folders[name])]
    if parts_here:
        val = [name for name in ("val", "valid", "validation") if name in others][:1]
        others = [name for name in folders if name not in (*parts_here, *val)]
        if "train" not in parts_here or len(parts_here + val) == 1:
            missing = "test" if "train" in parts_here else "train"
            hint = f" If {others[0]}/ has the {missing} images, rename it." if len(others) == 1 else ""
            raise UsageError(f"{root} has {parts_here[0]}/ but no {missing}/<class>/…: expected {LAYOUT}.{hint}")
        names: list[str] = ["train", *val, *parts_here[1:]]
        if others:
            note_once(f"{root}: only {' and '.join(f'{name}/' for name in names)} are used, not {', '.join(others)}")
        parts = {name: _tree(root / name, f"{name}/", ignored) for name in names}
        for name in names[1:]:
            if parts[name].keys() != parts["train"].keys():
                differences = " and ".join(
                    f"only {part}/ has {_listed(sorted(only))}"
                    for part, other in (("train", name), (name, "train"))
                    if (only := parts[part].keys() - parts[other].keys())
                )
                raise UsageError(f"the classes below {root} differ: {differences}; both need a folder for every class")
    else:
        parts = {"all": _tree(root, "", ignored)}
    if ignored:
        heic = sum(name.lower().endswith(HEIC_SUFFIXES) for name in ignored)
        remedy = f". {heic:,} are HEIC: {HEIC_REMEDY}" if heic else ""
        note_once(f"{root}: {len(ignored):,} files are not {KINDS} and are ignored: {_listed(ignored)}{remedy}")
    return Listing(parts)


def list_table(table: Path, group: str | None, skip_bad: bool) -> Listing:
    """Return the image files of a table, see `read_table`. Paths are absolute, or relative to the table's folder.

    A split column holds words of `PARTS`, in upper or lower case; without test rows, val is also the test set. Without
    the column, test images are drawn.

    Raises:
        UsageError: the table is invalid, or files are missing and not `skip_bad`.
    """
    folder = str(table.parent)
    rows: dict[str, tuple[str, str, str]] = {}  # label, part and group by path
    files: list[File] = []
    missing: list[str] = []
    part_of_group: dict[str, str] = {}
    repeated = 0
    for number, path, label, split, group_name, _ in read_table(table, group):
        part = PARTS.get(split.lower(), "none") if split else ""
        fault = ""
        if part == "none":
            fault = f"split {split[:80]!r} is none of {', '.join(PARTS)}.{nearest(split[:80], PARTS)}"
        elif path in rows:
            repeated += 1
            values = zip(("label", "split", "group"), rows[path], (label, part, group_name), strict=True)
            for column, above, here in values:
                if above != here:
                    fault = f"{path[:200]} has the {column} {here[:80]!r}, and {above[:80]!r} in a row above"
        elif files and bool(part) != bool(rows[files[0].path][1]):
            fault = "some rows have a split, others none: give each one, or leave the column out"
        elif group_name and part_of_group.setdefault(group_name, part) != part:
            fault = f"group {group_name[:80]!r} is in {part_of_group[group_name]} and in {part}: leave it in one"
        else:
            rows[path] = label, part, group_name
            try:
                status = os.stat(os.path.join(folder, path))  # noqa: PTH116, PTH118 (faster than Path for many files)
                files.append(File(path, status.st_size, status.st_mtime_ns))
            except OSError:
                missing.append(path)
                files.append(File(path, 0, 0))  # decoding reports it as missing
            except ValueError:  # a NUL, or half of a surrogate pair
                fault = f"no file can be called {path[:80]!r}"
        if fault:
            raise UsageError(f"{table}, row {number}: {fault}")

    if missing and not skip_bad:
        examples = _listed(path[:200] for path in missing)
        raise UsageError(
            f"{len(missing):,} of {len(files):,} images of {table} do not exist: {examples}; paths are relative to "
            f"{table.parent}/. To leave them out: --data.skip_bad true"
        )
    if repeated:
        note_once(f"{table}: {repeated:,} rows repeat an earlier row, and count once")
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
    for file in sorted(files):
        label, part, _ = rows[file.path]
        parts[part or "all"][label].append(file)
    untrained = [name for name, members in next(iter(parts.values())).items() if not members]
    if untrained:
        raise UsageError(f"{table} has no training images of class {_listed(untrained)}: add some, or remove the class")
    return Listing(parts, {path: name for path, (_, _, name) in rows.items() if name})


def keep_only(listing: Listing, only: frozenset[str], root: Path) -> Listing:
    """Return a listing without the images, classes and parts that were added since a training began, and report them.

    only: keys of the images that the training began with. If none of them is left, the listing is returned unchanged.
    """
    parts: dict[str, Tree] = {}
    for part, tree in listing.parts.items():
        parts[part] = {name: [file for file in files if image_key(file.path) in only] for name, files in tree.items()}
    trained = [name for name, files in next(iter(parts.values())).items() if files]
    parts = {part: {name: tree[name] for name in trained} for part, tree in parts.items() if any(tree.values())}
    added = len(files_of(listing.parts)) - len(files_of(parts))
    if not parts:
        return listing
    if added:
        note_once(f"{root}: this run does not use {counted(added, 'image')} added since it began")
    return Listing(parts, listing.groups)


def sort_classes(names: Iterable[str]) -> list[str]:
    """Return class names in label order: by value if all are whole numbers, else by name.

    Folders and tables share the order, so that a run and a training on its reviewed labels have the same classes.
    """
    classes = sorted(names)
    if all(re.fullmatch("-?[0-9]+", name) for name in classes):
        classes.sort(key=int)
    return classes


def _tree(root: Path, prefix: str, ignored: list[str]) -> Tree:
    """Return the classes below `root` with their files, whose paths get `prefix`. Add other files to `ignored`."""
    entries = visible_entries(str(root), _unreadable)
    tables = (entry.path for entry in entries if entry.name.lower().endswith(TABLES))
    table_hint = next((f" Did you mean --data-dir {path}?" for path in tables), "")
    classes = sorted((entry for entry in entries if is_folder(entry)), key=lambda entry: entry.name)
    loose = [entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES) and not is_folder(entry)]
    if loose:
        raise UsageError(
            f"{len(loose):,} images lie directly in {root} ({_listed(loose)}): "
            f"move each into a folder named after its class, such as {root / 'cat' / loose[0]}.{table_hint}"
        )
    if not classes:
        raise UsageError(f"{root} has no class folders: expected {LAYOUT}.{table_hint}")
    if len(classes) == 1:
        hint = f" Did you mean --data-dir {classes[0].path}?" if _has_subfolders(classes[0]) else table_hint
        raise UsageError(f"{root} has one class only ({classes[0].name}), a classifier needs two or more.{hint}")
    check_class_names([entry.name for entry in classes], f"in {root}, the folder")
    paths = {entry.name: entry.path for entry in classes}
    tree = {name: sorted(_images(paths[name], f"{prefix}{name}/", ignored)) for name in sort_classes(paths)}
    empty = [name for name, files in tree.items() if not files]
    if empty:
        is_heic = any(name.lower().endswith(HEIC_SUFFIXES) for name in ignored)
        remedy = HEIC_REMEDY if is_heic else "add some or remove the folder"
        raise UsageError(f"no {KINDS} image in {root} for class {_listed(empty)}: {remedy}")
    return tree


def _images(path: str, prefix: str, ignored: list[str]) -> Iterator[File]:
    """Yield the image files in the folder `path` and below it. Add other files to `ignored`."""
    for entry in walk(path, _unreadable):
        if is_folder(entry):
            continue
        name = prefix + entry.path[len(path) + 1 :].replace(os.sep, "/")
        if not entry.name.lower().endswith(SUFFIXES):
            ignored.append(name)
            continue
        try:
            status = os.stat(entry.path)  # noqa: PTH116 (faster than Path for many files)
        except OSError:  # a broken link: decoding reports it as missing
            yield File(name, 0, 0)
            continue
        if stat.S_ISREG(status.st_mode):
            yield File(name, status.st_size, status.st_mtime_ns)
        else:  # reading a pipe or a device may never end
            ignored.append(name)


def _unreadable(error: OSError) -> NoReturn:
    raise Failure(f"the folder {error.filename} cannot be read: {error.strerror}") from error


def _has_subfolders(folder: os.DirEntry[str]) -> bool:
    return any(is_folder(entry) for entry in visible_entries(folder.path, _unreadable))


def _fault(bad: Mapping[str, str]) -> str:
    """Return "damaged", "missing" or "damaged or missing" for unreadable files with their reasons."""
    missing = [reason == MISSING for reason in bad.values()]
    return "missing" if all(missing) else "damaged or missing" if any(missing) else "damaged"


def _listed(names: Iterable[str] | Mapping[str, str]) -> str:
    """Return the first three names, with their reasons if given, and the number of further names."""
    texts = [f"{name} ({reason})" for name, reason in names.items()] if isinstance(names, Mapping) else list(names)
    more = f" and {len(texts) - 3:,} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
