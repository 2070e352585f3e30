"""One's own images: `ROOT/train/<class>/…` and `ROOT/test/<class>/…`, or `ROOT/<class>/…` split by a seed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from cifar_lit.data.cache import File, decoded
from cifar_lit.data.decode import SUFFIXES
from cifar_lit.data.image_set import ImageSet, ImageSize, check_class_names, parse_image_size
from cifar_lit.errors import Failure, UsageError
from cifar_lit.text import note

KINDS = "JPEG, PNG, WebP, BMP or GIF"
LAYOUT = "ROOT/train/<class>/… and ROOT/test/<class>/…, or ROOT/<class>/…"

Tree = dict[str, list[File]]  # the files of each class, both sorted


def folder(
    root: Path,
    train: bool,
    image_size: ImageSize | None = None,
    channels: int = 3,
    test_size: float = 0.2,
    split_seed: int = 0,
    skip_bad: bool = False,
    cache_dir: Path | None = None,
    resize: str = "crop",
) -> ImageSet:
    """The train or test images below `root` (JPEG, PNG, WebP, BMP, GIF's first frame; any mode and size).

    Classes are the sorted names of the class folders, whose subfolders are searched too; hidden files are not seen. Where there
    is a ROOT/val or ROOT/valid beside ROOT/train, its images follow those of train, as `val_rows`, and are the test images
    too if there is no ROOT/test. The images are mapped from the cache, so they may be more than fit into memory.

    Args:
        root: the folder.
        train: whether the training images are meant.
        image_size: what all images are scaled to; None keeps their own size (H, W) when all agree and it is at most 64,
            else squares of 32.
        channels: 3 (RGB) or 1 (grey).
        test_size: where ROOT has no train/ and test/, the share of each class that is for testing.
        split_seed: chooses that share; the choice depends on nothing else but the paths below ROOT.
        skip_bad: leave damaged images out, and say how many, instead of failing.
        cache_dir: where the decoded images are kept for the next time; see `default_cache_dir`.
        resize: how images of other proportions get that size, one of `decode.RESIZES`.

    Raises:
        UsageError: for a folder that is not laid out as said.
        Failure: for damaged images and for a disk that is full.
    """
    if not 0 < test_size < 1:
        raise UsageError(f"--data.test_size must be between 0 and 1, not {test_size}")
    size = None if image_size is None else parse_image_size(image_size)
    if channels not in (1, 3):
        raise UsageError(f"folder has 1 or 3 channels, not {channels}.")
    parts = scan(root, test_size, split_seed)
    files = [file for tree in parts.values() for members in tree.values() for file in members]
    images, bad = decoded(root, files, size, channels, cache_dir, resize)
    if bad and not skip_bad:
        damaged = f"{len(bad):,} of {len(files):,} images below {root} are damaged: {_listed(bad)}"
        raise Failure(f"{damaged}; mend or remove them, or go on without with --data.skip_bad true")

    chosen = [part for part in parts if part != "test"] if train else [*parts][-1:]
    labels: dict[str, list[int]] = {}
    for part, tree in parts.items():
        left_out = {file.path: bad[file.path] for members in tree.values() for file in members if file.path in bad}
        for name, members in tree.items():
            if members and all(file.path in left_out for file in members):
                raise Failure(f"no {part} image of class {name} below {root} can be read: {_listed(bad)}")
        labels[part] = [label for label, members in enumerate(tree.values()) for file in members if file.path not in bad]
        if left_out and part in chosen:
            of = f"{sum(map(len, tree.values())):,} {part} images below {root}"
            _note(f"{len(left_out):,} of {of} are damaged and left out: {_listed(left_out)}")
    chosen_labels = torch.tensor([label for part in chosen for label in labels[part]], dtype=torch.int64)
    count = len(chosen_labels)
    pixels = torch.from_numpy(images[:count] if train else images[len(images) - count :])
    val_rows = range(len(labels["train"]), count) if train and len(chosen) > 1 else None
    return ImageSet(pixels, chosen_labels, tuple(parts["train"]), val_rows, mapped=True)


def scan(root: Path, test_size: float, split_seed: int) -> dict[str, Tree]:
    """The image files of each part: train, then val or valid where there is one, then test where the former is not that too.

    All have the same classes, of which test may be empty in some. Raises UsageError when `root` is not laid out as a data set.
    """
    if not root.is_dir():
        wrong = "is a file, not a folder; unpack it first" if root.exists() else "does not exist"
        raise UsageError(f"{root} {wrong}: --data-dir must name a folder with {LAYOUT}")
    ignored: list[str] = []
    level = {entry.name: entry for entry in _visible(str(root)) if entry.is_dir()}
    others = [name for name in level if name not in ("train", "test")]
    named = [name for name in ("train", "test") if name in level and (not others or _has_subfolders(level[name].path))]
    parts: dict[str, Tree] = {"train": {}, "test": {}}
    if named:
        val = [name for name in ("val", "valid") if name in others][:1]
        others = [name for name in others if name not in val]
        if "train" not in named or len(named + val) == 1:
            missing = "test" if "train" in named else "train"
            hint = f" Is {others[0]}/ meant?" if len(others) == 1 else ""
            raise UsageError(f"{root} has {named[0]}/ but no {missing}/<class>/… beside it: want {LAYOUT}.{hint}")
        names: list[str] = ["train", *val, *named[1:]]
        if others:
            _note(f"{root}: only {' and '.join(f'{name}/' for name in names)} are used, not {', '.join(others)}")
        parts = {name: _tree(root / name, f"{name}/", ignored) for name in names}
        for name in names[1:]:
            only = {part: sorted(parts[part].keys() - parts[other].keys()) for part, other in (("train", name), (name, "train"))}
            if any(only.values()):
                differences = " and ".join(f"{part}/ alone has {_listed(classes)}" for part, classes in only.items() if classes)
                raise UsageError(f"the classes below {root} differ: {differences}; both need a folder for every class")
    else:
        for name, files in _tree(root, "", ignored).items():
            # the order of a hash is the same with every library and machine
            shuffled = sorted(files, key=lambda file: sha256(os.fsencode(f"{split_seed}/{file.path}")).digest())
            count = min(max(round(len(files) * test_size), 1), len(files) - 1)  # one at least on either side, where it has two
            parts["train"][name], parts["test"][name] = sorted(shuffled[count:]), sorted(shuffled[:count])
        if not any(parts["test"].values()):
            raise UsageError(f"every class below {root} has one image only, so none is left to test with")
    if ignored:
        _note(f"{root}: {len(ignored):,} files that are no {KINDS} are ignored: {_listed(ignored)}")
    return parts


def _tree(root: Path, prefix: str, ignored: list[str]) -> Tree:
    """The classes below `root` with their files, whose paths get `prefix`; names of other files go to `ignored`."""
    level = _visible(str(root))
    classes = [entry for entry in level if entry.is_dir()]
    loose = [entry.name for entry in level if entry.name.lower().endswith(SUFFIXES) and not entry.is_dir()]
    if loose:
        raise UsageError(
            f"{len(loose):,} images lie directly in {root} ({_listed(loose)}): "
            f"move each into a folder named after its class, such as {root / 'cat' / loose[0]}"
        )
    if not classes:
        raise UsageError(f"{root} has no class folders: want {LAYOUT}")
    if len(classes) == 1:
        hint = f" Is --data-dir {classes[0].path} meant?" if _has_subfolders(classes[0].path) else ""
        raise UsageError(f"{root} has one class only ({classes[0].name}), a classifier needs two or more.{hint}")
    check_class_names([entry.name for entry in classes], f"in {root}, the folder")
    tree = {entry.name: sorted(_images(entry.path, f"{prefix}{entry.name}/", ignored)) for entry in classes}
    empty = [name for name, files in tree.items() if not files]
    if empty:
        raise UsageError(f"no {KINDS} image in {root} for class {_listed(empty)}: add some or remove the folder")
    return tree


def _images(path: str, prefix: str, ignored: list[str], above: frozenset[str] = frozenset()) -> Iterator[File]:
    """Image files in the folder `path` and below; a link that leads back to a folder above is not followed."""
    here = os.path.realpath(path)
    if here in above:
        return
    for entry in _visible(path):
        name = prefix + entry.name
        if entry.is_dir():
            yield from _images(entry.path, f"{name}/", ignored, above | {here})
        elif not entry.name.lower().endswith(SUFFIXES):
            ignored.append(name)
        elif entry.is_file():
            status = entry.stat()
            yield File(name, status.st_size, status.st_mtime_ns)
        elif not Path(entry.path).exists():  # a link to nothing: decoding will name it among the damaged
            yield File(name, 0, 0)
        else:  # a pipe would be waited for, a device never end
            ignored.append(name)


def _visible(path: str) -> list[os.DirEntry[str]]:
    """Entries of a folder by name, without hidden ones and what macOS adds to zip files."""
    try:
        with os.scandir(path) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))), key=lambda e: e.name)
    except OSError as error:
        raise Failure(f"the folder {path} cannot be read: {error.strerror}") from error


def _has_subfolders(path: str) -> bool:
    return any(entry.is_dir() for entry in _visible(path))


def _listed(names: Iterable[str] | Mapping[str, str]) -> str:
    """The first three names, with the reasons where there are some, and how many more."""
    texts = [f"{name} ({reason})" for name, reason in names.items()] if isinstance(names, Mapping) else list(names)
    more = f" and {len(texts) - 3:,} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


@cache
def _note(line: str) -> None:
    """Prints a note once a process, and in one process a machine: a run opens its data several times."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        note(line)
