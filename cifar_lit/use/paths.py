"""From what is typed to image files: files, folders, patterns, and a list on standard input."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from cifar_lit.data.decode import SUFFIXES

PATTERN = re.compile(r"[*?\[]")


class Found(NamedTuple):
    """A file to classify, or with a reason, what there is nothing to classify of."""

    path: str
    reason: str | None = None


def find_images(words: Sequence[str], listed: BinaryIO) -> Iterator[Found]:
    """The image files that some words mean, in the order of the words.

    A folder means the images in it and below, known by their suffixes, in natural order (2.png before 10.png); hidden files
    are not seen. A file means itself, whatever its suffix. A pattern with *, ? or [ means what it fits, and ** any depth. The
    word - means the paths that `listed` holds, one a line, or with a NUL behind each. Whatever is not there, or holds no image,
    comes with the reason, so that it is a row among the others.
    """
    for word in words:
        if word == "-":
            for path in _listed(listed.read()):
                yield from _meant(path, pattern=False)
        else:
            yield from _meant(word, pattern=True)


def _listed(data: bytes) -> list[str]:
    return [os.fsdecode(path) for path in data.split(b"\0" if b"\0" in data else b"\n") if path]


def _meant(path: str, pattern: bool) -> Iterator[Found]:
    if os.path.isdir(path):  # noqa: PTH112 (a path that is no text is kept as it is)
        found = _below(path, frozenset())
        first = next(found, None)
        yield first or Found(path, "the folder holds no JPEG, PNG, WebP, BMP or GIF")
        yield from found
    elif pattern and PATTERN.search(path) and not os.path.lexists(path):
        fitting = sorted(glob.glob(path, recursive=True), key=natural)  # noqa: PTH207
        if not fitting:
            yield Found(path, "no file fits this pattern")
        for file in fitting:
            if not os.path.isdir(file):  # noqa: PTH112
                yield Found(file)
            elif "**" not in path:  # ** gives what is in the folder too
                yield from _below(file, frozenset())
    else:
        yield Found(path)


def _below(folder: str, above: frozenset[str]) -> Iterator[Found]:
    """Images in a folder and below it; a link that leads back to a folder above is not followed."""
    here = os.path.realpath(folder)
    if here in above:
        return
    try:
        with os.scandir(folder) as entries:
            level = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: natural(entry.name))
    except OSError as error:
        yield Found(folder, f"the folder cannot be read: {error.strerror}")
        return
    for entry in level:
        if entry.is_dir():
            yield from _below(entry.path, above | {here})
        elif entry.name.lower().endswith(SUFFIXES):
            yield Found(entry.path)


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts numbers within names by their value, and otherwise by letters; equal for equal names only."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if place % 2 else (-1, part.casefold()) for place, part in enumerate(parts)], name
