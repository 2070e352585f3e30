"""Find image files and classify them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.files import as_on_disk
from cifar_lit.base.text import natural_key, note
from cifar_lit.data.photos.decode import KINDS, DecodeError, decode_all, remedy_for
from cifar_lit.data.photos.formats import HEIC_SUFFIXES, IMAGES
from cifar_lit.data.photos.walk import is_folder, is_skipped, skipped_text, walk
from cifar_lit.inference.load import Classifier
from cifar_lit.run.predictions import TOP, Row

# ---- From arguments to image files: files, folders, patterns, and a list on standard input.

PATTERN = re.compile(r"[*?\[]")


class ImageFile(NamedTuple):
    """A file to classify. With an error, `path` is an argument without images."""

    path: str
    error: str | None = None


def find_images(paths: Sequence[str], stdin: BinaryIO) -> Iterator[ImageFile]:
    """Yield the image files selected by `paths`, in order. A pattern or folder without images yields an error.

    Args:
        paths: files with any suffix, folders, patterns, or - for the paths in `stdin`. A folder selects the images
            below it by suffix, in natural order (2.png before 10.png), without hidden and system folders. A pattern has
            *, ? or [; ** means any depth. Names need not be UTF-8. Accents may have another Unicode form than the disk.
        stdin: paths, each ending with a newline, or each with a NUL.
    """
    for path in paths:
        if path == "-":
            data = stdin.read()
            end = b"\n"
            if b"\0" in data:
                end = b"\0"
            names = [os.fsdecode(line) for line in data.split(end) if line]
        elif PATTERN.search(path) and not os.path.lexists(path):
            names = sorted(_matches(path), key=natural_key)
            if not names:
                yield ImageFile(path, "no file matches this pattern")
        else:
            names = [path]
        for name in map(as_on_disk, names):
            if os.path.isdir(name):  # noqa: PTH112
                yield from _files_below(name)
            else:
                yield ImageFile(name)


def _matches(pattern: str) -> set[str]:
    """Return the paths that match a pattern. A pattern with ** matches files only, and visits each folder once."""
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        found = set()
        for path in glob.glob(pattern):  # noqa: PTH207
            other_parts = {*Path(path).parts}.difference(parts)  # a folder that the pattern names counts
            if not any(map(is_skipped, other_parts)):
                found.add(path)
        return found
    place = parts.index("**")
    below = "/".join(filter(None, parts[place + 1 :])) or "*"
    tops = ["./"]
    if place:
        tops = glob.glob("/".join([*parts[:place], ""]))  # noqa: PTH207
    matches: set[str] = set()
    for top in tops:
        folders = [top]
        for entry in walk(top, lambda error: None):
            if is_folder(entry):
                folders.append(f"{entry.path}/")
        for folder in folders:
            if not place:
                folder = folder.removeprefix("./")
            matches |= _matches(glob.escape(folder) + below)
    return {match for match in matches if not os.path.isdir(match)}  # noqa: PTH112


def _files_below(folder: str) -> Iterator[ImageFile]:
    """Yield the images in a folder and below it, then an error for each folder that cannot be read.

    HEIC files are included: their rows then say why they are not read. A folder without images yields an error.
    """
    errors: list[OSError] = []
    skipped: list[str] = []
    others: list[str] = []
    is_empty = True
    for entry in walk(folder, errors.append, skipped):
        if is_folder(entry) or Path(entry.path).is_fifo():  # reading a named pipe would wait for its writer
            continue
        if entry.name.lower().endswith((*IMAGES, *HEIC_SUFFIXES)):
            is_empty = False
            yield ImageFile(entry.path)
        else:
            others.append(entry.name)
    for error in errors:
        yield ImageFile(error.filename, f"the folder cannot be read: {error.strerror}")
    if is_empty and not errors:
        yield ImageFile(folder, f"the folder contains no {KINDS}.{remedy_for(others)}".rstrip("."))
    if skipped:
        note(f"{folder}: {skipped_text(skipped)}")


# ---- From files to rows. Files are classified in chunks.

CHUNK = 64  # files to predict at once


def classify_files(
    classifier: Classifier, files: Sequence[ImageFile], top: int = TOP
) -> Iterator[tuple[list[Row], Tensor]]:
    """Classify files in order. Memory does not grow with their number.

    Yields:
        The rows of each chunk, and its readable images, uint8 (B, C, H, W). The row of an unreadable file has the
        reason as `error`.
    """
    size, channels, *_ = classifier.preparation
    decoded = decode_all((file.path for file in files if file.error is None), classifier.preparation)
    for start in range(0, len(files), CHUNK):
        chunk = files[start : start + CHUNK]
        results = [None if file.error else next(decoded) for file in chunk]
        pixels = [result for result in results if isinstance(result, np.ndarray)]
        array = np.array(pixels, np.uint8).reshape(-1, *size, channels)
        images = torch.from_numpy(array).permute(0, 3, 1, 2)
        predictions = iter(classifier.predict_batch(images, top))
        rows = []
        for index, (file, result) in enumerate(zip(chunk, results, strict=True), start):
            reason = result.reason if isinstance(result, DecodeError) else file.error
            row = Row(index, (), path=file.path, error=reason)
            if row.error is None:
                best = next(predictions)
                row = replace(
                    row,
                    top=best.top,
                    novelty=best.novelty,
                    unknown=best.unknown,
                    prediction_set=best.prediction_set,
                )
            rows.append(row)
        yield rows, images
