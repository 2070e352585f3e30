"""Own images: `ROOT/train/<class>/…` and `ROOT/test/<class>/…`, `ROOT/<class>/…` split by seed, or a table of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.text import counted, listed, nfc, note_once
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.cache import Duplicates, Index, decoded
from cifar_lit.data.photos.duplicates import group_files
from cifar_lit.data.photos.layout import LAYOUT, File, Listing, Tree, part_of, scan
from cifar_lit.data.photos.table import list_table, table_hint
from cifar_lit.data.settings import DataSettings, Split
from cifar_lit.data.sources import Source
from cifar_lit.data.split import draw_by_label, draw_rows


def folder(settings: DataSettings, train: bool) -> ImageSet:
    """Return the training or test images of a folder or a table, see `list_table`.

    Classes are the names of the class folders, see `sort_classes`. Their subfolders are searched too. Hidden and system
    folders are skipped. The images of ROOT/val follow the images of ROOT/train, as `val_rows`; without ROOT/test they
    are the test images. Images are memory-mapped from the cache, so they may exceed the memory.

    A split drawn by seed keeps near-duplicates on one side. For a split given by folders or a table, a note reports
    near-duplicates across its sides.

    Args:
        settings: `root` is the folder or table. Without train/ and test/, a fraction `test_size` of each class is drawn
            for testing. The draw depends on `split.seed`, the paths below ROOT, groups and near-duplicates. With folds,
            no test images are drawn, because every image is in the test set of one fold.
        train: whether to return the training images.

    Raises:
        UsageError: the settings are invalid, or the folder or table has another layout.
        Failure: images are damaged (unless `skip_bad`), or the disk is full.
    """
    listing, split = _list_images(settings), settings.split

    def arrange(duplicates: Duplicates) -> dict[str, Tree]:
        if "all" not in listing.parts:
            return listing.parts
        if split.folds:
            return {"train": listing.parts["all"]}
        return draw_test(listing, duplicates, split)

    images, index = decoded(settings, lambda duplicates: files_of(arrange(duplicates)))
    if index.bad:
        count = f"{len(index.bad):,} of {len(index.files):,} images {listing.where}"
        faults = f"{count} cannot be read: {_with_reasons(index.bad)}"
        if not settings.images.skip_bad:
            remedy = "mend or remove them, or leave them out with --data.skip_bad true"
            raise Failure(f"{faults}; {remedy}. To resume a run, restore them as they were")
        note_once(f"{faults}; they are left out")
    parts = dict(arrange(index.duplicates))
    if index.duplicates:
        _report_duplicates(parts, index.duplicates, listing.where)
    if index.levels and not settings.images.levels:
        low, high = index.levels
        note_once(f"{settings.path}: 16-bit values from {low:,} to {high:,} become black to white (--data.levels)")
    tests = parts.pop("test", {})
    used = parts if train else {"test": tests}
    return _image_set(images, index, listing, used, train)


def _list_images(settings: DataSettings) -> Listing:
    """Return the image files of a folder or a table, without those that were added since a resumed training began."""
    if settings.root is None:
        raise UsageError(f"the data set `folder` needs --data-dir PATH: a table, or {LAYOUT}")
    root, group, wanted = settings.path, settings.split.group, settings.images
    if root.is_file():
        listing = list_table(root, group, wanted.skip_bad, wanted.group_names, wanted.separator)
    else:
        if group is not None:
            fault = f"data.split.group names a column of a table, but {root} is not a table"
            raise UsageError(f"{fault}: list the images in a table")
        try:
            listing = scan(root)
        except UsageError as error:
            raise UsageError(f"{error}{table_hint(root)}") from None
        if any(map(part_of, listing.classes)) and (hint := table_hint(root)):
            note_once(f"{root}: the classes are the folders {listed(listing.classes)}{hint}")
        if wanted.separator:
            listing = join_copies(listing, root)
    if settings.only is not None:
        listing = keep_only(listing, settings.only, root)
    if [*listing.parts] == ["train", "val"] and not settings.split.folds:
        note_once(f"{root}: there are no test images, so val is the test set, and train gives the validation images")
        listing = replace(listing, parts={"train": listing.parts["train"], "test": listing.parts["val"]})
    return listing


def join_copies(listing: Listing, root: Path) -> Listing:
    """Return a listing in which equal files in several classes of a part are one image with all their labels."""
    sizes = Counter(file.bytes for file in files_of(listing.parts))
    firsts: dict[tuple[str, str], File] = {}
    labels: dict[str, dict[str, float]] = {}

    def content(file: File) -> str:
        if sizes[file.bytes] > 1:
            with suppress(OSError):  # reported when it is decoded
                return sha256((root / file.path).read_bytes()).hexdigest()
        return file.path

    for part, tree in listing.parts.items():
        for name, files in tree.items():
            for file in files:
                first = firsts.setdefault((part, content(file)), file)
                labels.setdefault(first.path, {})[name] = 1.0
    texts = {path: "|".join(own) for path, own in labels.items()}
    parts: dict[str, Tree] = {part: {text: [] for text in sorted({*texts.values()})} for part in listing.parts}
    for (part, _), file in firsts.items():
        parts[part][texts[file.path]].append(file)
    note_once(f"{root}: {sum(sizes.values()):,} files are {len(labels):,} images with one or several labels")
    return replace(listing, parts=parts, labels=labels)


def _image_set(images: np.ndarray, index: Index, listing: Listing, parts: Mapping[str, Tree], train: bool) -> ImageSet:
    """Return the readable images of some parts. images: uint8 (N, H, W, C), of all parts; the test images come last."""
    labels: list[int] = []
    paths: list[str] = []
    val_rows = None
    for part, tree in parts.items():
        first = len(labels)
        for label, members in enumerate(tree.values()):
            readable = [file.path for file in members if file.path not in index.bad]
            labels += [label] * len(readable)
            paths += readable
        if train and part == "val":
            val_rows = range(first, len(labels))
    start = 0
    if not train:
        start = len(images) - len(paths)
    values = torch.tensor(labels, dtype=torch.int64)
    if listing.labels:
        values = torch.tensor(listing.label_rows(paths)).reshape(len(paths), len(listing.classes))
    groups = group_files(paths, listing.groups, index.duplicates)
    return ImageSet(
        torch.from_numpy(images[start : start + len(labels)]),
        values,
        listing.classes,
        val_rows,
        mapped=True,
        groups=None if groups is None else torch.from_numpy(groups),
        names=paths,
        levels=index.levels,
        skipped=[*index.bad],
        columns={name: [values.get(path, "") for path in paths] for name, values in listing.columns.items()},
    )


FOLDER = Source(folder, at_hand=lambda settings: settings.root is not None and settings.path.exists())


def files_of(parts: Mapping[str, Tree]) -> list[File]:
    """Return the files of parts in the order of their rows."""
    files: list[File] = []
    for tree in parts.values():
        for members in tree.values():
            files += members
    return files


def draw_test(listing: Listing, duplicates: Duplicates, split: Split) -> dict[str, Tree]:
    """Split all images into train and test: `test_size` of each class. Groups and near-duplicates stay together.

    Raise UsageError if no image can be spared for testing.
    """
    tree = listing.parts["all"]
    files = files_of({"all": tree})
    counts = np.array([len(members) for members in tree.values()])
    labels = np.repeat(np.arange(len(counts)), counts)
    groups = group_files([file.path for file in files], listing.groups, duplicates)
    # The order by hash is the same with every library and on every machine.
    digests = []
    for file in files:
        digests.append(sha256(f"{split.seed}/{nfc(file.path)}".encode(errors="surrogateescape")).digest())
    order = np.empty(len(files), np.int64)
    order[sorted(range(len(files)), key=digests.__getitem__)] = np.arange(len(files))
    if listing.labels:
        tests = draw_by_label(np.array(listing.label_rows(file.path for file in files)), split.test_size, order, groups)
    else:
        # A class with two or more images has at least one image on each side.
        sizes = np.array([min(max(round(count * split.test_size), 1), count - 1) for count in counts.tolist()])
        tests = draw_rows(labels, sizes, order, groups)
    if not tests.any():
        fault = f"every class {listing.where} has only one image or group"
        raise UsageError(f"{fault}, so no test images can be drawn: add images")
    tested = {file for file, is_test in zip(files, tests.tolist(), strict=True) if is_test}
    parts: dict[str, Tree] = {"train": {}, "test": {}}
    for name, members in tree.items():
        parts["train"][name] = [file for file in members if file not in tested]
        parts["test"][name] = [file for file in members if file in tested]
    return parts


def _report_duplicates(parts: Mapping[str, Tree], duplicates: Duplicates, where: str) -> None:
    """Report images of two classes, and held-out images that are near-duplicates of training images, else of any."""
    places: dict[str, tuple[str, str]] = {}  # part and class of each image
    for part, tree in parts.items():
        for name, files in tree.items():
            places |= dict.fromkeys([file.path for file in files], (part, name))
    mixed: list[str] = []
    across: list[str] = []
    for paths in duplicates:
        first, *others = sorted(paths, key=lambda path: (places[path][0] != "train", path))
        mixed += [f"{path} and {first}" for path in others if places[path][1] != places[first][1]]
        if places[first][0] == "train":
            across += [f"{path} of {first}" for path in others if places[path][0] != "train"]
    if mixed:
        count = counted(len(mixed), "image")
        joined = 'with --data.separator "|", equal files in class folders are one image with several labels'
        note_once(f"classes share {count} {where}, such as {mixed[0]}: remove the wrong one; {joined}")
    kind = "near-duplicates (the same except for scaling, encoding, brightness or a central crop by up to 3 %)"
    if across:
        count = f"{len(across):,} held-out images {where}"
        note_once(f"{count} are {kind} of training images, such as {across[0]}: scores will be too high")
    else:
        count = f"{sum(map(len, duplicates)):,} of {len(places):,} images {where}"
        note_once(f"{count} are {kind} of each other: they are kept on one side of a split")


def keep_only(listing: Listing, only: frozenset[str], root: Path) -> Listing:
    """Return a listing without the images, classes and parts that were added since a training began, and report them.

    only: NFC paths of the images that the training began with. If none is left, the listing is returned unchanged.
    """
    parts: dict[str, Tree] = {}
    trained: list[str] = []  # classes
    for part, tree in listing.parts.items():
        kept = {name: [file for file in files if nfc(file.path) in only] for name, files in tree.items()}
        if listing.labels:
            trained = [*kept]
        elif not trained:
            trained = [name for name, files in kept.items() if files]
        if any(kept.values()):
            parts[part] = {name: kept[name] for name in trained}
    added = len(files_of(listing.parts)) - len(files_of(parts))
    if not parts:
        return listing
    if added:
        note_once(f"{root}: this run does not use {counted(added, 'image')} added since it began")
    return replace(listing, parts=parts)


def _with_reasons(bad: Mapping[str, str]) -> str:
    """Return the reasons why files are unreadable, each with its first files and the number of further ones."""
    names: dict[str, list[str]] = {}
    for name, reason in bad.items():
        names.setdefault(reason, []).append(name)
    return listed(f"{listed(files)} ({reason})" for reason, files in names.items())
