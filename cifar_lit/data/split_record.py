"""The images of a training and their sides, as stored in its checkpoints: a resumed training keeps its own split.

Images of a folder or table are identified by their path and pixels, all other images by their position and pixels. The
record is part of the checkpoint, not a file of the run folder, because a plain Trainer has no run folder. It is
compressed to about 10 bytes for each image with a path, and one hash for all others.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

import torch

from cifar_lit.data.image_set import ImageSet, image_key
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import Failure

MAX_HASHED = 4 << 30  # bytes of all images; larger data sets, which exceed many memories, are identified by path only
MAX_TEXT = 256 << 20  # bytes of an uncompressed record; about five million paths

Row = tuple[str, str, int]  # path, side, and hash of class and pixels
Record = dict[str, Any]


def split_record(parts: SplitImages) -> Record:
    """Return the record of a split: `digest`, and if the images have names, `rows` as compressed JSON, uint8 (N,)."""
    rows = split_rows(parts)
    text = json.dumps(rows).encode()
    record: Record = {"digest": sha256(text).hexdigest()}
    if parts.train_images.names is not None and len(text) <= MAX_TEXT:
        record["rows"] = torch.frombuffer(bytearray(zlib.compress(text)), dtype=torch.uint8)
    return record


def split_rows(parts: SplitImages) -> list[Row]:
    """Return a row for each image. The separate test images of a data set without names cannot change sides."""
    images = parts.train_images
    sides = ["unused"] * len(images)
    sets = [(images, sides)]
    for side, rows in zip(("train", "val"), parts.split, strict=True):
        for row in rows.tolist():
            sides[row] = side
    if parts.folds:
        for row in parts.fold_rows.tolist():
            sides[row] = "test"
    elif images.names is not None:
        with suppress(Exception):  # the function of a user may have no test images
            sets.append((parts.test_images, ["test"] * len(parts.test_images)))
    record = [(image_key(name), "skipped", 0) for name in images.skipped]
    for image_set, set_sides in sets:
        names = image_set.names or [str(row) for row in range(len(image_set))]
        record += zip(map(image_key, names), set_sides, image_hashes(image_set), strict=True)
    return record


def image_hashes(images: ImageSet) -> list[int]:
    """Return the CRC-32 of class name and pixels of each image, only of the class name for a large data set."""
    seeds = [zlib.crc32(name.encode()) for name in images.classes]
    labels = images.labels.tolist()
    if images.images.nbytes > MAX_HASHED:
        return [seeds[label] for label in labels]
    pixels = images.images.flatten(1).numpy()
    return [zlib.crc32(row, seeds[label]) for row, label in zip(pixels, labels, strict=True)]


def recorded_rows(record: Mapping[str, Any]) -> list[Row] | None:
    """Return the rows of a record, None if its images have no names. Raise Failure for an invalid record."""
    packed = record.get("rows")
    if packed is None:
        return None
    try:
        text = zlib.decompressobj().decompress(packed.numpy().tobytes(), MAX_TEXT)
        rows = [(name, side, code) for name, side, code in json.loads(text)]
        if any((type(name), type(side), type(code)) != (str, str, int) for name, side, code in rows):
            raise ValueError("a row has other types")
    except (AttributeError, TypeError, ValueError, RecursionError, zlib.error):
        raise Failure("the checkpoint's list of images is damaged: use another checkpoint") from None
    return rows


def split_fault(parts: SplitImages, saved: list[Row] | None) -> str:
    """Return how the images and their sides differ from the rows of a record. None: rows without names."""
    if saved is None:
        fault = f"the images of {parts.dataset}, or their order, differ from those that this run was trained on"
        return f"{fault}: use the same images, or start a new run"
    rows = split_rows(parts)
    names = {name for name, _, _ in rows}
    contents = {(name, code) for name, _, code in rows}
    places = set(rows)
    faults = {
        "are missing": [name for name, _, _ in saved if name not in names],
        "have changed": [name for name, _, code in saved if name in names and (name, code) not in contents],
        "would change sides": [row[0] for row in saved if row not in places],
        "are new": names.difference(row[0] for row in saved),
        "are in another order": names,
    }
    fault, images = next(pair for pair in faults.items() if pair[1])
    text = f"images of this run {fault} ({len(images):,} of {len(saved):,}): {_listed(images)}"
    return f"{text}. Restore the images and their table as they were, or start a new run"


def _listed(names: Iterable[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(name[:200] for name in names[:3]) + more
