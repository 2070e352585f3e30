"""The image files of a folder: part folders such as train/ and test/, or class folders to split by seed."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NoReturn

from cifar_lit.data.cache import File
from cifar_lit.data.decode import KINDS, SUFFIXES, remedy_for
from cifar_lit.data.image_set import check_class_names
from cifar_lit.data.progress import note_once
from cifar_lit.data.table import SUFFIXES as TABLES
from cifar_lit.data.walk import entries_of, is_folder, skipped_text, visible_entries, walk
from cifar_lit.errors import Failure, UsageError, nearest
from cifar_lit.text import counted, listed, nfc

LAYOUT = "ROOT/train/<class>/… and ROOT/test/<class>/…, or ROOT/<class>/…"
PLAIN_PARTS = [(part, "") for part in ("train", "val", "test")]
MAX_WRAPPERS = 20  # folders within each other, because a link may lead to a folder above
UNLABELLED = ("all", "unknown", "unlabeled", "unlabelled")
SAME_FOLDERS = 0.7  # share of common names from which the folders in two folders are the same classes
# A word of a folder's name: a part, a word that says nothing, such as "images", or both, as in "trainset".
_WORD = re.compile(
    "(?:(?P<train>train(?:ing|val)?|训练)|(?P<val>val(?:id(?:ation)?)?|dev|验证)|(?P<test>test(?:ing)?|测试))?"
    "(?:sets?|data(?:sets?)?|images?|imgs?|pictures?|photos?|folder|split|集)?"
)

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


def sort_classes(names: Iterable[str]) -> list[str]:
    """Return class names in label order: by value if all are whole numbers, else by name.

    Folders and tables share the order, so that a run and a training on its reviewed labels have the same classes.
    """
    classes = sorted(names)
    if all(re.fullmatch("-?[0-9]+", name) for name in classes):
        classes.sort(key=int)
    return classes


def part_of(name: str) -> tuple[str, str] | None:
    """Return the part that a folder's name means, and the other words of the name; None if it names no part.

    "Training" and "train_images" are ("train", ""), "seg_test" is ("test", "seg").
    """
    parts: list[str] = []
    others: list[str] = []
    for word in _words(name):
        match = _WORD.fullmatch(word)
        if match is None:
            others.append(word)
        elif match.lastgroup:
            parts.append(match.lastgroup)
    return (parts[0], " ".join(others)) if len(parts) == 1 else None


def _words(name: str) -> list[str]:
    """Return the words of a folder's name in lower case, without numbers; trainImages2 has two."""
    return re.findall(r"[^\W\d_]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", nfc(name)).lower())


def _names_no_class(name: str) -> bool:
    """Return whether a folder's name says nothing about its images, such as "images", "unknown" or "seg_test"."""
    words = _words(name)
    is_general = bool(words) and all(_WORD.fullmatch(word) or word in UNLABELLED for word in words)
    return is_general or part_of(name) is not None


def scan(root: Path) -> Listing:
    """Return the image files below a folder. Raise UsageError if `root` lacks the layout of a data set."""
    if not root.is_dir():
        wrong = "is a file, not a folder; unpack it first" if root.exists() else "does not exist"
        raise UsageError(f"{root} {wrong}: --data-dir must name a folder with {LAYOUT}")
    reader = _Reader(str(root))
    top = reader.unwrapped(str(root), lambda name: part_of(name) in PLAIN_PARTS)
    if parts := reader.find_parts(top):
        trees = reader.read_parts(parts)
        reader.stray += map(reader.name, reader.contents(top)[1])
    else:
        trees = {"all": reader.tree(top)}
    reader.note(top)
    return Listing(trees)


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
        for entry in visible_entries(path, _unreadable, self.skipped):
            if is_folder(entry):
                folders.setdefault(nfc(entry.name), []).append(entry.path)
            elif entry.name.lower().endswith(SUFFIXES):
                images.append(entry.path)
        return folders, images

    def unwrapped(self, path: str, stop: Callable[[str], bool] = lambda name: False) -> str:
        """Follow folders that hold nothing but one folder of folders, such as train/train/ or archive/dataset/.

        stop: whether an inner folder of this name is a part or a class.
        """
        for _ in range(MAX_WRAPPERS):
            folders, images = self.contents(path)
            if len(folders) != 1 or len(images) > 1:
                return path
            ((name, (inner, *_)),) = folders.items()
            if stop(name) or not _inner_folders(inner):
                return path
            self.stray += map(self.name, images)
            path = inner
        return path

    # ---- Part folders.

    def find_parts(self, top: str) -> dict[str, str]:
        """Return the part folders in `top` by their parts: train, then val and test. Empty if it has class folders."""
        folders, _ = self.contents(top)
        groups: dict[str, dict[str, list[str]]] = {"": {}}  # names of folders by part, for each set of other words
        for name in folders:
            if key := part_of(name):
                groups.setdefault(key[1], {}).setdefault(key[0], []).append(name)
        complete = [words for words, names in groups.items() if "train" in names and len(names) > 1]
        words = min(complete, default="", key=len)
        names = groups[words]
        used = [name for part in names.values() for name in part]
        others = [name for name in folders if name not in used]
        leading = next((names[part][0] for part in ("train", "test") if part in names), None)
        # Classes may be called train and test. Then they hold images, not folders.
        if leading is None or ((others or words) and not _inner_folders(folders[leading][0])):
            return {}
        for part, same in names.items():
            if len(same) > 1:
                raise UsageError(f"{top} has {same[0]}/ and {same[1]}/, which both mean {part}: keep or rename one")
        if not complete:
            missing = "test" if "train" in names else "train"
            hint = f" If {others[0]}/ has the {missing} images, rename it." if len(others) == 1 else ""
            if missing == "test":
                hint += f" To draw the test images from the training images: --data-dir {folders[leading][0]}"
            elif len(others) > 1:
                hint = f" If {listed(f'{name}/' for name in others)} are the classes, move them into train/."
            raise UsageError(f"{top} has {leading}/ but no {missing}/<class>/…: expected {LAYOUT}.{hint}")
        if others:
            kept = " and ".join(f"{name}/" for name in used)
            note_once(f"{self.root}: only {kept} are used, not {', '.join(others)}")
        return {part: folders[names[part][0]][0] for part in ("train", "val", "test") if part in names}

    def read_parts(self, parts: Mapping[str, str]) -> dict[str, Tree]:
        """Return the files of part folders. Parts without class folders are left out."""
        trees = {"train": self.tree(self.unwrapped(parts["train"]))}
        for part, path in [*parts.items()][1:]:
            if tree := self.held_out_tree(part, path, trees["train"]):
                trees[part] = tree
        for path in [path for part, path in parts.items() if part not in trees]:
            files = [entry for entry in walk(path, _unreadable) if not is_folder(entry)]
            count = sum(entry.name.lower().endswith(SUFFIXES) for entry in files)
            what = f"{path} has {counted(count, 'image')} without a folder for each class"
            lists = [entry.path for entry in files if entry.name.lower().endswith((*TABLES, ".json"))]
            if lists:
                what += f" (as in Tiny ImageNet, {lists[0]} may list them: move each image into a folder of its class)"
            use = f"; predict them after the training: cifar-lit classify RUN {path}" if count else ""
            if len(trees) == 1:
                drawn = f"--data-dir {parts['train']} draws the test images from the training images"
                raise UsageError(f"{what}, so it cannot be the test set. {drawn}{use}")
            note_once(f"{what} and is not used{use}")
        return trees

    def held_out_tree(self, part: str, path: str, train: Tree) -> Tree | None:
        """Return the files of val or test by the classes of `train`; None if there are no folders of classes."""
        inner = self.unwrapped(path, train.__contains__)
        folders, images = self.contents(inner)
        extra = [name for name in folders if name not in train]
        if len(extra) == len(folders) and all(map(_names_no_class, folders)):
            return None
        if extra:
            texts = [f"{name}.{nearest(name, train)}".rstrip(".") for name in extra]
            raise UsageError(
                f"the classes below {self.root} differ: only {self.name(inner)}/ has {listed(texts)}; "
                "a class needs training images: add some, rename the folder or remove it"
            )
        self.stray += map(self.name, images)
        tree = {name: self.files(folders.get(name, [])) for name in train}
        missing = [name for name, files in tree.items() if not files]
        if len(missing) == len(tree):
            return None
        if missing:
            kind = "test" if part == "test" else "validation"
            note_once(f"{self.root}: no {kind} images of class {listed(missing)}, so the scores leave it out")
        return tree

    # ---- Class folders.

    def tree(self, path: str) -> Tree:
        """Return the files of the class folders in `path`, which all have images."""
        folders, images = self.contents(path)
        entries = chain(*(visible_entries(level, _unreadable) for level in {path: 0, self.root: 0}))
        tables = [entry.path for entry in entries if entry.name.lower().endswith(TABLES[:-1])]  # a .txt is a readme
        tables.sort(key=lambda table: not re.search("train|label", Path(table).stem.lower()))
        hint = f" Did you mean --data-dir {tables[0]}?" if tables else ""
        if images and len(folders) < 2:
            names = [Path(image).name for image in images]
            raise UsageError(
                f"{len(names):,} images lie directly in {path} ({listed(names)}): "
                f"move each into a folder named after its class, such as {Path(path) / 'cat' / names[0]}.{hint}"
            )
        if not folders:
            others = [entry.name for entry in visible_entries(path, _unreadable)]
            raise UsageError(f"{path} has no class folders: expected {LAYOUT}.{remedy_for(others)}{hint}")
        if len(folders) == 1:
            ((name, paths),) = folders.items()
            hint = f" Did you mean --data-dir {paths[0]}?" if _inner_folders(paths[0]) else hint
            raise UsageError(f"{path} has one class only ({name}), a classifier needs two or more.{hint}")
        self.check_not_parts(path, folders)
        check_class_names([*folders], f"in {path}, the folder")
        self.stray += map(self.name, images)
        tree = {name: self.files(folders[name]) for name in sort_classes(folders)}
        if empty := [name for name, files in tree.items() if not files]:
            others = [name for name in self.ignored if not {*name.split("/")}.isdisjoint(empty)]
            remedy = remedy_for(others) or " Add some or remove the folder."
            if len(folders) - len(empty) == 1:
                used = next(name for name in folders if name not in empty)
                remedy = f"{remedy_for(others)} Did you mean --data-dir {folders[used][0]}?"
            raise UsageError(f"no {KINDS} image in {path} for class {listed(empty)}.{remedy}")
        return tree

    def check_not_parts(self, path: str, folders: Mapping[str, list[str]]) -> None:
        """Raise UsageError if class folders hold the folders of classes, which means that they are parts or copies."""
        inner: dict[str, set[str]] = {}  # names of the folders in each class folder that holds only folders
        for name, paths in folders.items():
            if names := _inner_folders(paths[0]):
                inner[name] = names if len(names) > 1 else _inner_folders(self.unwrapped(paths[0]))
        beside = {name.lower() for name in folders}
        for name, names in inner.items():
            if len(names & beside) >= max(2, SAME_FOLDERS * len(names)):
                remedy = f"remove {name}/ if it is a copy, else move the other folders into train/"
                raise UsageError(f"{path} has class folders, and {name}/ with folders of the same names: {remedy}")
        every = set().union(*inner.values())
        shared = sum(map(len, inner.values())) / max(len(every) * len(inner), 1)
        if len(inner) < len(folders) or len(every) < 2 or shared < SAME_FOLDERS:
            return
        sizes = {name: sum(1 for _ in walk(folders[name][0], _unreadable)) for name in inner}
        train, test = sorted(inner, key=lambda name: -sizes[name])[:2]
        remedy = f"rename {train}/ to train/ and {test}/ to test/"
        if all(map(part_of, every)):
            remedy = f"put these folders above the classes, such as {Path(path) / 'train' / train}"
        raise UsageError(
            f"the folders {listed(f'{name}/' for name in inner)} in {path} hold the same folders "
            f"({listed(sorted(every))}), as the parts of a data set do: {remedy}. If they are classes, list the images "
            "in a table with the columns path and label"
        )

    def files(self, paths: Iterable[str]) -> list[File]:
        """Return the image files in folders and below them, sorted."""
        files = [file for path in paths for file in self.images_below(path)]
        return sorted(files, key=lambda file: (nfc(file.path), file))

    def images_below(self, path: str) -> Iterator[File]:
        """Yield the image files in a folder and below it. Add other files to `ignored`."""
        prefix = self.name(path)
        for entry in walk(path, _unreadable, self.skipped):
            if is_folder(entry):
                continue
            name = f"{prefix}/{entry.path[len(path) + 1 :]}".replace(os.sep, "/")
            if not entry.name.lower().endswith(SUFFIXES):
                self.ignored.append(name)
                continue
            try:
                status = os.stat(entry.path)  # noqa: PTH116 (faster than Path for many files)
            except OSError:  # a broken link: decoding reports it as missing
                yield File(name, 0, 0)
                continue
            if stat.S_ISREG(status.st_mode):
                yield File(name, status.st_size, status.st_mtime_ns)
            else:  # reading a pipe or a device may never end
                self.ignored.append(name)

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
            counts = Counter(Path(name).suffix.lower() or "without suffix" for name in self.ignored)
            kinds = listed(f"{number:,} {kind}" for kind, number in counts.most_common())
            what = f"{len(self.ignored):,} files are not {KINDS} and are ignored ({kinds}): {listed(self.ignored)}."
            note_once(f"{self.root}: {what}{remedy_for(self.ignored)}")


def _inner_folders(path: str) -> set[str]:
    """Return the names of the folders in a folder, in lower case; none if it also holds images."""
    names = set()
    for entry in entries_of(path, _unreadable):
        if is_folder(entry):
            names.add(nfc(entry.name).lower())
        elif entry.name.lower().endswith(SUFFIXES):
            return set()
    return names


def _unreadable(error: OSError) -> NoReturn:
    raise Failure(f"the folder {error.filename} cannot be read: {error.strerror}") from error
