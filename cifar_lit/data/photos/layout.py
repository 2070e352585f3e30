"""The image files of a folder: part folders such as train/ and test/, or class folders to split by seed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from cifar_lit.base.errors import UsageError
from cifar_lit.base.text import counted, listed, natural_key, nfc, note_once
from cifar_lit.data.image_set import check_class_names
from cifar_lit.data.photos.decode import IMAGES, KINDS, UNREAD_SUFFIXES, remedy_for

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
LAYOUT = "a folder for each class (animals/cat/1.jpg, animals/dog/1.jpg), or train/ and test/ with such folders"
SAME_FOLDERS = 0.7  # share of common names from which the folders in some folders are the same classes
# Parts by the names of folders, and by the words of a table's split column.
PARTS = {
    "train": "train", "training": "train", "trainset": "train", "val": "val", "valid": "val", "validation": "val",
    "dev": "val", "publictest": "val", "test": "test", "testing": "test", "testset": "test", "privatetest": "test",
}  # fmt: skip


class File(NamedTuple):
    """A file: path below the root with "/" between its parts, and what changes when another file takes its place."""

    path: str
    bytes: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0


def file_at(place: str, path: str) -> File:
    """Return the file at a place. A missing one has no bytes: decoding reports it."""
    try:
        status = os.stat(place)  # noqa: PTH116 (faster than Path for many files)
    except OSError:
        return File(path)
    return File(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


Tree = dict[str, list[File]]  # the sorted files of each class, in label order


@dataclass(frozen=True)
class Listing:
    """The image files of a data set."""

    where: str  # the folder or table, for messages
    # Train, then val and test if they exist; or only `all`, from which test images are drawn. All parts have the same
    # classes. Classes may be empty except in train.
    parts: dict[str, Tree]
    groups: Mapping[str, str] = field(default_factory=dict)  # by path, for files that stay on one side of a split
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # for `data.groups`: values by path
    # If images have several labels: for each path its labels with 1, and unknown ones with -1. The trees then have a
    # key for each set of labels.
    labels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in label order."""
        if not self.labels:
            return tuple(next(iter(self.parts.values())))
        names: set[str] = set()
        for tree in self.parts.values():
            for files in tree.values():
                for file in files:
                    names.update(name for name, value in self.labels[file.path].items() if value == 1)
        return tuple(sort_classes(names))

    def label_rows(self, paths: Iterable[str]) -> list[list[float]]:
        """Return the labels of images with several labels, in the form of `ImageSet`."""
        classes = self.classes
        return [[self.labels[path].get(name, 0.0) for name in classes] for path in paths]


def sort_classes(names: Iterable[str]) -> list[str]:
    """Return class names in label order: by value if all are numbers, else by name.

    Folders and tables share the order, so that a run and a training on its reviewed labels have the same classes.
    """
    classes = sorted(names)
    if all(re.fullmatch("-?[0-9]+([.][0-9]+)?(e[0-9]+)?", name) for name in classes):
        classes.sort(key=Decimal)
    return classes


def note_similar_classes(where: str, names: Iterable[str]) -> None:
    """Report classes whose names differ in case or blanks only, which may be one class by mistake."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault("".join(name.casefold().split()), []).append(name)
    similar = [" and ".join(map(repr, group)) for group in spellings.values() if len(group) > 1]
    if similar:
        note_once(f"{where}: classes differ in case or blanks only: {listed(similar)}. Rename those that are the same")


def part_of(name: str) -> str | None:
    """Return the part that a folder's name means: "Training", "train_images" and "seg_train" are train."""
    parts = [PARTS[word] for word in re.split(r"[\W_]+", name.lower()) if word in PARTS]
    return parts[0] if len(parts) == 1 else None


def scan(root: Path) -> Listing:
    """Return the image files below a folder. Raise UsageError if `root` lacks the layout of a data set."""
    if not root.is_dir():
        raise UsageError(f"{root} does not exist: --data-dir must name a folder with {LAYOUT}")
    reader = _Reader(str(root))
    top = reader.unwrapped(str(root), lambda name: name.lower() in PARTS)
    if parts := reader.find_parts(top):
        trees = reader.read_parts(parts)
        reader.stray += map(reader.name, reader.contents(top)[1])
    else:
        trees = {"all": reader.tree(top)}
        reader.check_not_parts(top)
    reader.note(top)
    return Listing(f"below {root}", trees)


class _Reader:
    """Read the folders of a data set, and remember what was left out."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.ignored: list[str] = []  # files that are not images
        self.stray: list[str] = []  # images that belong to no class
        self.skipped: list[str] = []  # hidden and system folders

    def name(self, path: str) -> str:
        """Return a path below the root with "/" between its parts."""
        return os.path.relpath(path, self.root).replace(os.sep, "/")

    def contents(self, path: str) -> tuple[dict[str, list[str]], list[str]]:
        """Return the folders in a folder by their composed names, and the paths of the images in it."""
        folders: dict[str, list[str]] = {}  # a composed and a decomposed spelling are one folder
        images = []
        for entry in visible_entries(path, skipped=self.skipped):
            if is_folder(entry):
                folders.setdefault(nfc(entry.name), []).append(entry.path)
            elif entry.name.lower().endswith(IMAGES):
                images.append(entry.path)
        return folders, images

    def inner_folders(self, path: str) -> set[str]:
        """Return the names of the folders in a folder, in lower case; none if it also holds images."""
        folders, images = self.contents(path)
        return set() if images else {name.lower() for name in folders}

    def unwrapped(self, path: str, stop: Callable[[str], bool] = lambda name: False) -> str:
        """Follow folders that hold nothing but one folder of folders, such as train/train/ or archive/dataset/.

        stop: whether an inner folder of this name is a part or a class.
        """
        while True:
            folders, images = self.contents(path)
            if len(folders) != 1 or len(images) > 1:
                return path
            name = next(iter(folders))
            inner = folders[name][0]
            if stop(name) or not self.inner_folders(inner):
                return path
            path = inner

    # ---- Part folders.

    def find_parts(self, top: str) -> dict[str, str]:
        """Return the part folders in `top` by their parts: train, then val and test. Empty if it has class folders."""
        folders, _ = self.contents(top)
        parts: dict[str, str] = {}
        for name in sorted(folders, key=len):  # "test" rather than "test-multiple_fruits"
            if part := part_of(name):
                parts.setdefault(part, folders[name][0])
        others = [name for name, (path, *_) in folders.items() if path not in parts.values()]
        leading = parts.get("train", parts.get("test"))
        # A class may be called train or test. Then it holds images, not folders.
        if leading is None:
            return {}
        inner = self.inner_folders(leading)
        if others and not inner and not {"train", "test"} <= folders.keys():
            return {}
        if "train" not in parts or len(parts) == 1:
            name = Path(leading).name
            if name.lower() not in PARTS:
                return {}
            missing = "test" if "train" in parts else "train"
            alone = f"to train and test on the images of {name}/ alone: --data-dir {leading}"
            if others:
                alone += f"; if {name} is a class like {listed(others)}, rename its folder"
            raise UsageError(f"{top} has {name}/ but no {missing}/ with class folders: expected {LAYOUT}; {alone}")
        if others:
            kept = " and ".join(f"{self.name(path)}/" for path in parts.values())
            note_once(f"{self.root}: only {kept} are used, not {', '.join(others)}")
        return parts

    def read_parts(self, parts: Mapping[str, str]) -> dict[str, Tree]:
        """Return the files of part folders. Parts without class folders are left out."""
        trees = {"train": self.tree(self.unwrapped(parts["train"]))}
        for part in ("val", "test"):
            if part in parts:
                trees[part] = self.held_out_tree(part, parts[part], trees["train"])
        for part in [part for part, tree in trees.items() if not tree]:
            del trees[part]
            what = (
                f"{parts[part]} has no class folders with images. If a list names their classes, as in Tiny ImageNet, "
                "move each image into a folder of its class. If they have none, predict them after the training: "
                f"cifar-lit classify RUN {parts[part]}"
            )
            if len(trees) == 1:
                raise UsageError(f"{what}, and draw the test images from the others: --data-dir {parts['train']}")
            note_once(what)
        return trees

    def held_out_tree(self, part: str, path: str, train: Tree) -> Tree:
        """Return the files of val or test by the classes of `train`; nothing if there are no folders of classes."""
        inner = self.unwrapped(path, train.__contains__)
        folders, images = self.contents(inner)
        extra = [name for name in folders if name not in train]
        if extra and len(folders) > 1:
            raise UsageError(
                f"the classes below {self.root} differ: only {self.name(inner)}/ has {listed(extra)}; "
                "a class needs training images: add some, rename the folder or remove it"
            )
        self.stray += map(self.name, images)
        tree = {name: self.files(folders.get(name, [])) for name in train}
        missing = [name for name, files in tree.items() if not files]
        if len(missing) == len(tree):
            return {}
        if missing:
            note_once(f"{self.root}: no {part} images of class {listed(missing)}, so the scores leave it out")
        return tree

    # ---- Class folders.

    def tree(self, path: str) -> Tree:
        """Return the files of the class folders in `path`, which all have images."""
        folders, images = self.contents(path)
        if images and len(folders) < 2:
            names = [Path(image).name for image in images]
            raise UsageError(
                f"{len(names):,} images lie directly in {path} ({listed(names)}): "
                f"move each into a folder named after its class, such as {Path(path) / 'cat' / names[0]}"
            )
        if not folders:
            remedy = remedy_for(entry.name for entry in visible_entries(path))
            raise UsageError(f"{path} has no class folders: expected {LAYOUT}.{remedy}")
        if len(folders) == 1:
            raise UsageError(f"{path} has one class only ({listed(folders)}), a classifier needs two or more")
        check_class_names([*folders], f"in {path}, the folder")
        self.stray += map(self.name, images)
        note_similar_classes(self.root, sorted(folders))
        tree = {name: self.files(folders[name]) for name in sort_classes(folders)}
        if empty := [name for name, files in tree.items() if not files]:
            others = [file for file in self.ignored if not {*nfc(file).split("/")}.isdisjoint(empty)]
            remedy = remedy_for(others) or " Add some or remove the folder."
            raise UsageError(f"no {KINDS} image in {path} for class {listed(empty)}.{remedy}")
        return tree

    def check_not_parts(self, path: str) -> None:
        """Raise UsageError if the class folders hold about the same folders: then they are the parts.

        A part's name among them, such as train, was found to be a class.
        """
        folders, _ = self.contents(path)
        if PARTS.keys() & map(str.lower, folders):
            return
        inner = [self.inner_folders(self.unwrapped(paths[0])) for paths in folders.values()]
        every = set().union(*inner)
        if len(every) < 2 or sum(map(len, inner)) < SAME_FOLDERS * len(every) * len(inner):
            return
        raise UsageError(
            f"the folders {listed(f'{name}/' for name in folders)} in {path} hold the same folders "
            f"({listed(sorted(every))}), as parts do: rename the one with the training images to train/, and the one "
            "with the test images to test/. If they are classes, list the images in a table with path and label"
        )

    def files(self, paths: Iterable[str]) -> list[File]:
        """Return the image files in folders and below them, sorted. Add other files to `ignored`."""
        files: list[File] = []
        for path in paths:
            prefix = self.name(path)
            for entry in walk(path, skipped=self.skipped):
                name = f"{prefix}/{entry.path[len(path) + 1 :]}".replace(os.sep, "/")
                if is_folder(entry):
                    continue
                if entry.name.lower().endswith(IMAGES):
                    files.append(file_at(entry.path, name))
                else:
                    self.ignored.append(name)
        return sorted(files, key=lambda file: (nfc(file.path), file))

    def note(self, top: str) -> None:
        """Report the folder that was read, and what was left out."""
        if top != self.root:
            note_once(f"{self.root}: the images are those of {self.name(top)}/")
        if self.skipped:
            note_once(f"{self.root}: {skipped_text(self.skipped)}")
        if stray := dict.fromkeys(self.stray):
            count = counted(len(stray), "image")
            note_once(f"{self.root}: {count} beside the class folders left out: {listed(stray)}")
        if self.ignored:
            what = f"{len(self.ignored):,} files are not {KINDS} and are ignored: {listed(self.ignored)}."
            pictures = [file for file in self.ignored if file.lower().endswith(UNREAD_SUFFIXES)]
            note_once(f"{self.root}: {what}{remedy_for(pictures)}")


OnError = Callable[[OSError], object]
# Thumbnails, bins and snapshots of Synology, QNAP, Windows, Linux and macOS, in lower case. They repeat photos in
# another size, or keep deleted ones.
SYSTEM_FOLDERS = {
    "@eadir", "@tmp", "@sharebin", "@recycle", "@recently-snapshot", "@__thumb", "#recycle", "#snapshot", "recycler",
    "recycled", "$recycle.bin", "system volume information", "lost+found", "found.000", "__macosx", "__pycache__",
    "thumbs.db", "network trash folder", "temporary items",
}  # fmt: skip


def is_skipped(name: str) -> bool:
    """Return whether a file or folder is hidden, or created by a system."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def visible_entries(
    folder: str, on_error: OnError | None = None, skipped: list[str] | None = None
) -> Iterator[os.DirEntry[str]]:
    """Yield the visible entries of a folder in natural order.

    Args:
        folder: its path.
        on_error: callback with the error of a folder that cannot be read. Without it, the error is raised.
        skipped: list to which the paths of hidden and system folders are added.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: natural_key(entry.name))
    except OSError as error:
        if on_error is None:
            raise
        on_error(error)
        return
    for entry in entries:
        if not is_skipped(entry.name):
            yield entry
        elif skipped is not None and is_folder(entry):
            skipped.append(entry.path)


def walk(
    folder: str,
    on_error: OnError | None = None,
    skipped: list[str] | None = None,
    entered: set[str] | None = None,
) -> Iterator[os.DirEntry[str]]:
    """Yield the visible entries of a folder and of all folders below it, depth first, in natural order.

    Links to folders are followed, but each folder is entered only once: a link to a parent folder would never end. For
    the other arguments, see `visible_entries`.

    entered: real paths of the folders that were entered.
    """
    entered = {os.path.realpath(folder)} if entered is None else entered
    for entry in visible_entries(folder, on_error, skipped):
        if not is_folder(entry):
            yield entry
            continue
        place = os.path.realpath(entry.path)
        if place not in entered:
            entered.add(place)
            yield entry
            yield from walk(entry.path, on_error, skipped, entered)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; False for a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def skipped_text(skipped: Iterable[str]) -> str:
    """Return a line about hidden and system folders that were skipped, by their paths."""
    folders = set(skipped)
    names = sorted({os.path.basename(path) for path in folders})  # noqa: PTH119
    return f"{counted(len(folders), 'hidden or system folder')} skipped ({listed(names)})"
