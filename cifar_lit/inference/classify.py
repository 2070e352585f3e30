"""Files to rows: decoded by other processes where that pays, classified as they come, in their order."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cifar_lit.data.decode import SUFFIXES, decode_chunks, decode_files
from cifar_lit.errors import Failure
from cifar_lit.inference.load import Classifier
from cifar_lit.runs.predictions import TOP, Row

# ---- From what is typed to image files: files, folders, patterns, and a list on standard input.

PATTERN = re.compile(r"[*?\[]")


class ImageFile(NamedTuple):
    """A file to classify, or with a reason, what there is nothing to classify of."""

    path: str
    reason: str | None = None


def find_images(words: Sequence[str], listed: BinaryIO) -> Iterator[ImageFile]:
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


def _meant(path: str, pattern: bool) -> Iterator[ImageFile]:
    if os.path.isdir(path):  # noqa: PTH112 (a path that is no text is kept as it is)
        found = _below(path, frozenset())
        first = next(found, None)
        yield first or ImageFile(path, "the folder holds no JPEG, PNG, WebP, BMP or GIF")
        yield from found
    elif pattern and PATTERN.search(path) and not os.path.lexists(path):
        fitting = sorted(glob.glob(path, recursive=True), key=natural)  # noqa: PTH207
        if not fitting:
            yield ImageFile(path, "no file fits this pattern")
        for file in fitting:
            if not os.path.isdir(file):  # noqa: PTH112
                yield ImageFile(file)
            elif "**" not in path:  # ** gives what is in the folder too
                yield from _below(file, frozenset())
    else:
        yield ImageFile(path)


def _below(folder: str, above: frozenset[str]) -> Iterator[ImageFile]:
    """Images in a folder and below it; a link that leads back to a folder above is not followed."""
    here = os.path.realpath(folder)
    if here in above:
        return
    try:
        with os.scandir(folder) as entries:
            level = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: natural(entry.name))
    except OSError as error:
        yield ImageFile(folder, f"the folder cannot be read: {error.strerror}")
        return
    for entry in level:
        if entry.is_dir():
            yield from _below(entry.path, above | {here})
        elif entry.name.lower().endswith(SUFFIXES):
            yield ImageFile(entry.path)


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts numbers within names by their value, and otherwise by letters; equal for equal names only."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if place % 2 else (-1, part.casefold()) for place, part in enumerate(parts)], name


CHUNK = 64  # files that are decoded and then computed at once; four chunks a processor are held in memory
POOL_FROM = 200  # fewer files are decoded before other processes have started


def classify_files(classifier: Classifier, files: Sequence[ImageFile], top: int = TOP) -> Iterator[tuple[list[Row], Tensor]]:
    """The rows of some files after the other, in order, with the images of those that could be read: uint8 (B, C, H, W).

    A file that cannot be read has the reason as its row's `error`. Only some chunks are in memory at a time, however many
    files there are. Raises Failure when a decoding process is ended from outside.
    """
    work = partial(decode_files, size=classifier.size, channels=classifier.channels)
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    wanted = [[file.path for file in chunk if file.reason is None] for chunk in chunks]
    start = 0
    try:
        for chunk, paths, (pixels, bad) in zip(
            chunks, wanted, decode_chunks(work, wanted, all_cores=len(files) >= POOL_FROM), strict=True
        ):
            shape = (len(paths) - len(bad), *classifier.size, classifier.channels)
            images = torch.from_numpy(np.frombuffer(bytearray(pixels), np.uint8).reshape(shape)).permute(0, 3, 1, 2)
            predictions = iter(classifier.predictions(images, top))
            reasons = iter([bad.get(position) for position in range(len(paths))])
            rows = []
            for index, file in enumerate(chunk, start):
                reason = file.reason or next(reasons)
                if reason is not None:
                    rows.append(Row(index, (), path=file.path, error=reason))
                    continue
                found = next(predictions)
                rows.append(Row(index, found.top, path=file.path, novelty=found.novelty, unlike=found.unlike))
            yield rows, images
            start += len(chunk)
    except BrokenProcessPool as error:
        raise Failure("a decoding process was ended from outside, mostly for want of memory: lower --max-pixels") from error
