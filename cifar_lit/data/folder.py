"""One's own images: `ROOT/train/<class>/…` and `ROOT/test/<class>/…`, `ROOT/<class>/…` split by a seed, or a table of files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from cifar_lit.data.cache import Duplicates, File, decoded
from cifar_lit.data.decode import HEIC_SUFFIXES, MISSING, SUFFIXES, is_folder, walk
from cifar_lit.data.image_set import ImageSet, check_class_names
from cifar_lit.data.image_size import ImageSize, parse_image_size
from cifar_lit.data.progress import note_once
from cifar_lit.data.splits import draw_rows, group_files
from cifar_lit.data.table import SUFFIXES as TABLES
from cifar_lit.data.table import read_table
from cifar_lit.errors import Failure, UsageError, nearest

KINDS = "JPEG, PNG, WebP, BMP or GIF"
HEIC_REMEDY = "convert HEIC photos to JPEG first, such as with `magick mogrify -format jpg *.heic`"
LAYOUT = "ROOT/train/<class>/… and ROOT/test/<class>/…, or ROOT/<class>/…"
PARTS = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}  # by what a table calls them

Tree = dict[str, list[File]]  # the files of each class, both sorted


@dataclass(frozen=True)
class Listing:
    """The image files of a data set.

    parts: train, then val or valid where there is one, then test where the former is not that too; or only `all`, of which the
        test images are to be drawn. All have the same classes; in some, those behind train may be empty.
    groups: names of groups that no split may part, by path.
    """

    parts: dict[str, Tree]
    groups: Mapping[str, str] = field(default_factory=dict)


def folder(
    root: Path,
    train: bool,
    *,
    image_size: ImageSize | None = None,
    channels: int = 3,
    test_size: float | None = 0.2,
    split_seed: int = 0,
    skip_bad: bool = False,
    cache_dir: Path | None = None,
    resize: str = "crop",
    group: str | None = None,
) -> ImageSet:
    """The train or test images below `root` (JPEG, PNG, WebP, BMP, GIF's first frame; any mode and size).

    Classes are the sorted names of the class folders, whose subfolders are searched too; hidden files are not seen. Where there
    is a ROOT/val or ROOT/valid beside ROOT/train, its images follow those of train, as `val_rows`, and are the test images
    too if there is no ROOT/test. The images are mapped from the cache, so they may be more than fit into memory.

    Near-duplicates are kept on one side of a split that is drawn; where they are on both sides of one's own, a line says so.

    Args:
        root: the folder, or a table, see `list_table`.
        train: whether the training images are meant.
        image_size: what all images are scaled to; None keeps their own size (H, W) when all agree and it is at most 64,
            else squares of 32.
        channels: 3 (RGB) or 1 (grey).
        test_size: where ROOT has no train/ and test/, the share of each class that is for testing; None for none of them.
        split_seed: chooses that share; the choice depends on nothing else but the paths below ROOT, groups and near-duplicates.
        skip_bad: leave damaged and missing images out, and say how many, instead of failing.
        cache_dir: where the decoded images are kept for the next time; see `default_cache_dir`.
        resize: how images of other proportions get that size, one of `decode.RESIZES`.
        group: of a table, the column of groups.

    Raises:
        UsageError: for a folder or table that is not laid out as said.
        Failure: for damaged images and for a disk that is full.
    """
    if test_size is not None and not 0 < test_size < 1:
        raise UsageError(f"--data.test_size must be between 0 and 1, not {test_size}")
    size = None if image_size is None else parse_image_size(image_size)
    if channels not in (1, 3):
        raise UsageError(f"folder has 1 or 3 channels, not {channels}.")
    is_table = root.suffix.lower() in TABLES and root.exists() and not root.is_dir()
    if group is not None and not is_table:
        raise UsageError(
            f"data.group names a column of a table, and {root} is none: list the images in one, a row an image"
        )
    listing, where = (list_table(root, group, skip_bad), f"of {root}") if is_table else (scan(root), f"below {root}")

    def parts_by(duplicates: Duplicates) -> dict[str, Tree]:
        if "all" not in listing.parts:
            return listing.parts
        if test_size is None:
            return {"train": listing.parts["all"]}
        return draw_test(listing.parts["all"], listing.groups, duplicates, test_size, split_seed, where)

    parts = parts_by([])
    files = files_of(parts)

    def arrange(duplicates: Duplicates) -> list[File]:
        return files_of(parts_by(duplicates)) if duplicates else files

    images, bad, duplicates = decoded(root, files, arrange, size, channels, cache_dir, resize)
    if bad and not skip_bad:
        faults = f"{len(bad):,} of {len(files):,} images {where} are {_fault(bad)}: {_listed(bad)}"
        raise Failure(f"{faults}; mend or remove them, or go on without with --data.skip_bad true")
    if duplicates:
        parts = parts_by(duplicates)
        _tell_duplicates(parts, duplicates, where)

    if train and test_size is not None and len(parts) > 1 and "test" not in parts:
        lacking = "no test images but those to validate on, by which the best epoch is chosen"
        note_once(f"{root}: {lacking}: the score may be too good; --folds 5 tests on others")
    chosen = [part for part in parts if part != "test"] if train else [*parts][-1:]
    labels: dict[str, list[int]] = {}
    for part, tree in parts.items():
        left_out = {file.path: bad[file.path] for members in tree.values() for file in members if file.path in bad}
        for name, members in tree.items():
            if members and all(file.path in left_out for file in members):
                raise Failure(f"no {part} image of class {name} {where} can be read: {_listed(bad)}")
        labels[part] = [
            label for label, members in enumerate(tree.values()) for file in members if file.path not in bad
        ]
        if left_out and part in chosen:
            of = f"{sum(map(len, tree.values())):,} {part} images {where}"
            note_once(f"{len(left_out):,} of {of} are {_fault(left_out)} and left out: {_listed(left_out)}")
    chosen_labels = torch.tensor([label for part in chosen for label in labels[part]], dtype=torch.int64)
    count = len(chosen_labels)
    pixels = torch.from_numpy(images[:count] if train else images[len(images) - count :])
    val_rows = range(len(labels["train"]), count) if train and len(chosen) > 1 else None
    paths = [file.path for file in files_of({part: parts[part] for part in chosen}) if file.path not in bad]
    groups = group_files(paths, listing.groups, duplicates)
    together = None if groups is None else torch.from_numpy(groups)
    return ImageSet(pixels, chosen_labels, tuple(parts["train"]), val_rows, mapped=True, groups=together, names=paths)


def files_of(parts: Mapping[str, Tree]) -> list[File]:
    """The files of parts in the order of their rows."""
    return [file for tree in parts.values() for members in tree.values() for file in members]


def draw_test(
    tree: Tree, groups: Mapping[str, str], duplicates: Duplicates, test_size: float, split_seed: int, where: str
) -> dict[str, Tree]:
    """`tree` as train and test: `test_size` of each class is drawn for the test, of groups and near-duplicates all or none.

    Raises UsageError where none is left to test with.
    """
    files = files_of({"all": tree})
    counts = np.array([len(members) for members in tree.values()])
    labels = np.repeat(np.arange(len(counts)), counts)
    # the order of a hash is the same with every library and machine
    digests = [sha256(os.fsencode(f"{split_seed}/{file.path}")).digest() for file in files]
    order = np.empty(len(files), np.int64)
    order[sorted(range(len(files)), key=digests.__getitem__)] = np.arange(len(files))
    # one at least on either side, where it has two
    sizes = np.array([min(max(round(count * test_size), 1), count - 1) for count in counts.tolist()])
    tests = draw_rows(labels, sizes, order, group_files([file.path for file in files], groups, duplicates))
    if not tests.any():
        raise UsageError(f"every class {where} has one image only, or one group of them, so none is left to test with")
    parts: dict[str, Tree] = {part: {name: [] for name in tree} for part in ("train", "test")}
    names = [*tree]
    for file, label, test in zip(files, labels.tolist(), tests.tolist(), strict=True):
        parts["test" if test else "train"][names[label]].append(file)
    return parts


def _tell_duplicates(parts: Mapping[str, Tree], duplicates: Duplicates, where: str) -> None:
    """Says how many near-duplicates there are; of one's own split, how many held-out images are some of training images."""
    part_of = {file.path: part for part, tree in parts.items() for members in tree.values() for file in members}
    across: list[tuple[str, str]] = []
    for paths in duplicates:
        trained = [path for path in paths if part_of.get(path) == "train"]
        across += [(path, trained[0]) for path in paths if trained and part_of.get(path, "train") != "train"]
    kind = "near-duplicates (the same but for scaling, encoding, a slight crop or brightness)"
    if across:
        example = f"such as {across[0][0]} of {across[0][1]}"
        note_once(
            f"{len(across):,} held-out images {where} are {kind} of training images, {example}: scores will be too good"
        )
    else:
        of = f"{sum(map(len, duplicates)):,} of {len(part_of):,} images {where}"
        note_once(f"{of} are {kind} of each other: such are kept on one side of a split")


def scan(root: Path) -> Listing:
    """The image files below a folder; raises UsageError when `root` is not laid out as a data set."""
    if not root.is_dir():
        wrong = "is a file, not a folder; unpack it first" if root.exists() else "does not exist"
        raise UsageError(f"{root} {wrong}: --data-dir must name a folder with {LAYOUT}")
    ignored: list[str] = []
    level = {entry.name: entry for entry in _visible(str(root)) if is_folder(entry)}
    others = [name for name in level if name not in ("train", "test")]
    named = [name for name in ("train", "test") if name in level and (not others or _has_subfolders(level[name].path))]
    if named:
        val = [name for name in ("val", "valid", "validation") if name in others][:1]
        others = [name for name in level if name not in (*named, *val)]
        if "train" not in named or len(named + val) == 1:
            missing = "test" if "train" in named else "train"
            hint = f" Is {others[0]}/ meant?" if len(others) == 1 else ""
            raise UsageError(f"{root} has {named[0]}/ but no {missing}/<class>/… beside it: want {LAYOUT}.{hint}")
        names: list[str] = ["train", *val, *named[1:]]
        if others:
            note_once(f"{root}: only {' and '.join(f'{name}/' for name in names)} are used, not {', '.join(others)}")
        parts = {name: _tree(root / name, f"{name}/", ignored) for name in names}
        for name in names[1:]:
            only = {
                part: sorted(parts[part].keys() - parts[other].keys())
                for part, other in (("train", name), (name, "train"))
            }
            if any(only.values()):
                differences = " and ".join(
                    f"{part}/ alone has {_listed(classes)}" for part, classes in only.items() if classes
                )
                raise UsageError(f"the classes below {root} differ: {differences}; both need a folder for every class")
    else:
        parts = {"all": _tree(root, "", ignored)}
    if ignored:
        heic = sum(name.lower().endswith(HEIC_SUFFIXES) for name in ignored)
        remedy = f". {heic:,} are HEIC: {HEIC_REMEDY}" if heic else ""
        note_once(f"{root}: {len(ignored):,} files that are no {KINDS} are ignored: {_listed(ignored)}{remedy}")
    return Listing(parts)


def list_table(table: Path, group: str | None, skip_bad: bool) -> Listing:
    """The image files that a table lists, see `read_table`; their paths are absolute, or count from the table's folder.

    Labels are names, sorted by value where all are whole numbers. A split column holds words of `PARTS` in any case; val is the
    test set too where there is none. Without the column, test images are drawn.

    Raises:
        UsageError: for a table that cannot be meant, and for files that are not there unless `skip_bad`.
    """
    folder, rows = f"{table.parent}", dict[str, tuple[str, str, str]]()  # label, part and group by path
    files: list[File] = []
    missing: list[str] = []
    sides: dict[str, str] = {}  # of groups
    repeated = 0
    for number, path, label, split, group_name in read_table(table, group):
        part, fault = split and PARTS.get(split.lower(), "none"), ""
        if part == "none":
            fault = f"split {split[:80]!r} is none of {', '.join(PARTS)}.{nearest(split[:80], PARTS)}"
        elif path in rows:
            repeated += 1
            for what, above, here in zip(
                ("label", "split", "group"), rows[path], (label, part, group_name), strict=True
            ):
                if above != here:
                    fault = f"{path[:200]} has the {what} {here[:80]!r}, and {above[:80]!r} in a row above"
        elif files and bool(part) != bool(rows[files[0].path][1]):
            fault = "some rows have a split, others none: give each one, or leave the column out"
        elif group_name and sides.setdefault(group_name, part) != part:
            fault = f"group {group_name[:80]!r} is in {sides[group_name]} and in {part}: leave it in one"
        else:
            rows[path] = label, part, group_name
            try:
                status = os.stat(os.path.join(folder, path))
                files.append(File(path, status.st_size, status.st_mtime_ns))
            except OSError:
                missing.append(path)
                files.append(File(path, 0, 0))  # decoding will name it among the damaged
            except ValueError:  # a NUL, or half a character
                fault = f"no file can be called {path[:80]!r}"
        if fault:
            raise UsageError(f"{table}, row {number}: {fault}")

    if missing and not skip_bad:
        lost = f"{len(missing):,} of {len(files):,} images of {table} are not there: {_listed(path[:200] for path in missing)}"
        raise UsageError(f"{lost}; their paths count from {table.parent}/. To go on without them: --data.skip_bad true")
    if repeated:
        note_once(f"{table}: {repeated:,} rows repeat one above, and count once")
    classes = sorted({label for label, _, _ in rows.values()})
    check_class_names(classes, f"in {table}, the class")
    if all(re.fullmatch(r"-?[0-9]+", name) for name in classes):
        classes.sort(key=int)
    if len(classes) == 1:
        raise UsageError(f"{table} has one class only ({classes[0]}), a classifier needs two or more")
    named = {part for _, part, _ in rows.values()}
    if "" not in named and ("train" not in named or len(named) == 1):
        lacking = "val or test" if "train" in named else "train"
        raise UsageError(f"{table} has no {lacking} rows: without a split column, test images are drawn")
    parts: dict[str, Tree] = {
        part or "all": {name: [] for name in classes} for part in ("train", "val", "test", "") if part in named
    }
    for file in sorted(files):
        label, part, _ = rows[file.path]
        parts[part or "all"][label].append(file)
    untrained = [name for name, members in next(iter(parts.values())).items() if not members]
    if untrained:
        raise UsageError(
            f"{table} has no training images of class {_listed(untrained)}: add some, or leave the class out"
        )
    return Listing(parts, {path: name for path, (_, _, name) in rows.items() if name})


def _tree(root: Path, prefix: str, ignored: list[str]) -> Tree:
    """The classes below `root` with their files, whose paths get `prefix`; names of other files go to `ignored`."""
    level = _visible(str(root))
    table = next((f" Is --data-dir {entry.path} meant?" for entry in level if entry.name.lower().endswith(TABLES)), "")
    classes = [entry for entry in level if is_folder(entry)]
    loose = [entry.name for entry in level if entry.name.lower().endswith(SUFFIXES) and not is_folder(entry)]
    if loose:
        raise UsageError(
            f"{len(loose):,} images lie directly in {root} ({_listed(loose)}): "
            f"move each into a folder named after its class, such as {root / 'cat' / loose[0]}.{table}"
        )
    if not classes:
        raise UsageError(f"{root} has no class folders: want {LAYOUT}.{table}")
    if len(classes) == 1:
        hint = f" Is --data-dir {classes[0].path} meant?" if _has_subfolders(classes[0].path) else table
        raise UsageError(f"{root} has one class only ({classes[0].name}), a classifier needs two or more.{hint}")
    check_class_names([entry.name for entry in classes], f"in {root}, the folder")
    tree = {entry.name: sorted(_images(entry.path, f"{prefix}{entry.name}/", ignored)) for entry in classes}
    empty = [name for name, files in tree.items() if not files]
    if empty:
        is_heic = any(name.lower().endswith(HEIC_SUFFIXES) for name in ignored)
        remedy = HEIC_REMEDY if is_heic else "add some or remove the folder"
        raise UsageError(f"no {KINDS} image in {root} for class {_listed(empty)}: {remedy}")
    return tree


def _images(path: str, prefix: str, ignored: list[str]) -> Iterator[File]:
    """Yield the image files in the folder `path` and below it. Names of other files go to `ignored`."""
    for entry in walk(path, _visible):
        name = prefix + entry.path[len(path) + 1 :].replace(os.sep, "/")
        if is_folder(entry):
            continue
        if not entry.name.lower().endswith(SUFFIXES):
            ignored.append(name)
            continue
        try:
            status = os.stat(entry.path)
        except OSError:  # a link to nothing: decoding reports it as missing
            yield File(name, 0, 0)
            continue
        if stat.S_ISREG(status.st_mode):
            yield File(name, status.st_size, status.st_mtime_ns)
        else:  # reading a pipe or a device may never end
            ignored.append(name)


def _visible(path: str) -> list[os.DirEntry[str]]:
    """Entries of a folder by name, without hidden ones and what macOS adds to zip files."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                (entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))), key=lambda e: e.name
            )
    except OSError as error:
        raise Failure(f"the folder {path} cannot be read: {error.strerror}") from error


def _has_subfolders(path: str) -> bool:
    return any(is_folder(entry) for entry in _visible(path))


def _fault(bad: Mapping[str, str]) -> str:
    """Return what is wrong with files, by their reasons."""
    missing = [reason == MISSING for reason in bad.values()]
    return "missing" if all(missing) else "damaged or missing" if any(missing) else "damaged"


def _listed(names: Iterable[str] | Mapping[str, str]) -> str:
    """The first three names, with the reasons where there are some, and how many more."""
    texts = [f"{name} ({reason})" for name, reason in names.items()] if isinstance(names, Mapping) else list(names)
    more = f" and {len(texts) - 3:,} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
