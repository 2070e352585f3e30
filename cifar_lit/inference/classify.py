"""Find image files, classify them, and write the rows of `cifar-lit classify`."""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

import numpy as np
import torch

from cifar_lit.base.files import as_on_disk, is_below
from cifar_lit.base.text import csv_text, natural_key, note
from cifar_lit.data.photos.decode import HEIC_SUFFIXES, IMAGES, KINDS, DecodeError, decode_all, remedy_for
from cifar_lit.data.photos.layout import is_folder, is_skipped, skipped_text, walk
from cifar_lit.inference.load import Classifier

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
        stdin: a list as in `read_list`. A folder in it is searched unless it holds the working folder.
    """
    for path in paths:
        listed: set[str] = set()
        if path == "-":
            names = read_list(stdin.read())
            listed.update(names)
        elif PATTERN.search(path) and not os.path.lexists(path):
            names = sorted(_matches(path), key=natural_key)
            if not names:
                yield ImageFile(path, "no file matches this pattern")
        else:
            names = [path]
        for name in map(as_on_disk, names):
            if not os.path.isdir(name):  # noqa: PTH112
                yield ImageFile(name)
            elif listed and is_below(Path.cwd(), Path(name)):
                yield ImageFile(name, "a list does not select the working folder or one above it: type it instead of -")
            else:  # `find` lists a folder and its files
                yield from (file for file in _files_below(name) if file.path not in listed)


def read_list(data: bytes) -> list[str]:
    """Return the paths in a list, one a line, or each ending with a NUL. Blank lines are left out.

    The list may be UTF-16, as PowerShell writes it. Blanks, quotes and a carriage return around a path are removed if
    there is no such file.
    """
    encoding = json.detect_encoding(data)
    if encoding.startswith("utf-16-") and 5 * data.count(0) < 2 * len(data):  # `find . -print0` begins with .\0 as well
        encoding = "utf-8"
    text = data.decode(encoding, "replace")
    if encoding.startswith("utf-8"):  # names need not be valid
        text = os.fsdecode(data.removeprefix(codecs.BOM_UTF8))
    end = "\n"
    if "\0" in text:
        end = "\0"
    paths = []
    for line in text.split(end):
        if not os.path.lexists(as_on_disk(line)):
            line = line.strip().strip("'\"")
        if line:
            paths.append(line)
    return paths


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
    matches = set()
    for top in glob.glob("/".join([*parts[:place], ""]) or "./"):  # noqa: PTH207
        for entry in walk(top, lambda error: None):
            file = Path(entry.path)
            if file.match(below) and not is_folder(entry):
                matches.add(str(file))
    return matches


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


# ---- Rows of `cifar-lit classify`, as CSV or JSON lines. Unknown values are empty in CSV and null in JSON.
#
#     index                        number of the file
#     label, probability           most probable class, named as in `serve` and `Prediction`
#     class_2, probability_2, …    next classes
#     path                         path as given
#     novelty                      out-of-distribution score
#     unknown                      whether the image is rejected (yes or no)
#     prediction_set               classes of the prediction set (--coverage), in CSV with | between them
#     error                        why the file could not be read


Value = int | float | str | bool | Sequence[str] | None


@dataclass(frozen=True)
class Row:
    """Prediction for a file. top: the most probable classes with their probabilities; empty for an unreadable file."""

    index: int
    top: Sequence[tuple[str, float]]
    path: str | None = None
    novelty: float | None = None
    unknown: bool | None = None
    prediction_set: Sequence[str] | None = None
    error: str | None = None
    label: str | None = None  # the most probable class, or several labels with `|` between them

    def values(self, top: int) -> dict[str, Value]:
        """Return the values by column, with `top` classes and six digits."""
        values: dict[str, Value] = {"index": self.index}
        best = [*self.top[:top], *[(None, None)] * (top - len(self.top))]
        for rank, (name, probability) in enumerate(best, 1):
            values["label" if rank == 1 else f"class_{rank}"] = name
            values["probability" if rank == 1 else f"probability_{rank}"] = _rounded(probability)
        if self.label is not None:
            values["label"] = self.label
        values |= {"path": self.path, "novelty": _rounded(self.novelty), "unknown": self.unknown}
        return values | {"prediction_set": self.prediction_set, "error": self.error}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


Write = Callable[[Sequence[Row]], None]


def csv_rows(file: TextIO, top: int) -> Write:
    """Write a header to a file, and return a function that writes rows as CSV."""
    file.write(csv_text([Row(0, ()).values(top)]))

    def write(rows: Sequence[Row]) -> None:
        file.write(csv_text(map(_cell, row.values(top).values()) for row in rows))

    return write


def _cell(value: Value) -> object:
    if value is True:
        return "yes"
    if value is False:
        return "no"
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, tuple):
        return "|".join(value)
    return value


def json_rows(file: TextIO, top: int) -> Write:
    """Return a function that writes rows as JSON lines to a file."""

    def write(rows: Sequence[Row]) -> None:
        for row in rows:
            file.write(json.dumps(row.values(top)) + "\n")  # ASCII, as a path may contain invalid Unicode

    return write


# ---- From files to rows. Files are classified in chunks.

CHUNK = 64  # files to predict at once


def classify_files(classifier: Classifier, files: Sequence[ImageFile], top: int) -> Iterator[list[Row]]:
    """Yield the rows of each chunk of files, in order. That of an unreadable file has the reason as `error`."""
    channels, height, width = classifier.card.input_shape
    decoded = decode_all((file.path for file in files if file.error is None), classifier.preparation)
    for start in range(0, len(files), CHUNK):
        chunk = files[start : start + CHUNK]
        results = [None if file.error else next(decoded) for file in chunk]
        pixels = [result for result in results if isinstance(result, np.ndarray)]
        array = np.array(pixels, np.uint8).reshape(-1, height, width, channels)
        images = torch.from_numpy(array).permute(0, 3, 1, 2)
        predictions = iter(classifier.predict_batch(images, top))
        rows = []
        for index, (file, result) in enumerate(zip(chunk, results, strict=True), start):
            reason = result.reason if isinstance(result, DecodeError) else file.error
            if reason is None:
                best = next(predictions)
                values = best.novelty, best.unknown, best.prediction_set
                rows.append(Row(index, best.top, file.path, *values, label=best.label))
            else:
                rows.append(Row(index, (), file.path, error=reason))
        yield rows
