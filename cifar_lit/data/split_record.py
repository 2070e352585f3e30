"""The images of a training and their sides, as stored in its checkpoints: a resumed training keeps its own split.

Images of a folder or table are identified by their path and pixels, all other images by their position and pixels. The
record is part of the checkpoint, not a file of the run folder, because a plain Trainer has no run folder. It is
compressed to about 10 bytes for each image with a path, and one hash for all others.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.split_images import TEST, SplitImages
from cifar_lit.errors import Failure
from cifar_lit.text import listed, nfc

MAX_HASHED = 4 << 30  # bytes of all images; larger data sets, which exceed many memories, are identified by path only
MAX_TEXT = 256 << 20  # bytes of an uncompressed record; about five million paths
SKIPPED = TEST + 1  # side of unreadable images

Row = tuple[str, int, int]  # path, side, and hash of class and pixels
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
    record = [(nfc(name), SKIPPED, 0) for name in parts.train_images.skipped]
    for images, sides in parts.sides():
        names = images.names or [str(row) for row in range(len(images))]
        record += zip(map(nfc, names), sides.tolist(), image_hashes(images), strict=True)
        if images.names is None:
            break
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
        if any(tuple(map(type, row)) != (str, int, int) for row in rows):
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
    text = f"images of this run {fault} ({len(images):,} of {len(saved):,}): {listed(name[:200] for name in images)}"
    return f"{text}. Restore the images and their table as they were, or start a new run"
