"""The `data` entry of metrics.json, which identifies the images that a run was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cifar_lit.data.split_images import TEST

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def data_record(data: ImageData) -> dict[str, Any]:
    """Return SHA-256 fingerprints of images, labels and split, and the numbers of images and classes.

    Each image is identified by its pixels. So a fingerprint does not depend on the order, names or place of the files,
    and other labels change only that of the labels, unless a split by seed changes with them.
    """
    columns: dict[str, list[np.ndarray]] = {"images": [], "labels": [], "split": []}  # uint64 (N,), a key per image
    for image_set, sides in data.parts.sides():
        names = _keys([name.encode() for name in image_set.classes])
        for rows in torch.arange(len(image_set)).split(4096):  # in parts, because the images may be memory-mapped
            columns["images"].append(_keys(image_set.take(rows).flatten(1).numpy()))
            columns["labels"].append(names[image_set.labels[rows].numpy()])
            columns["split"].append(sides[rows].numpy().astype(np.uint64))
    keys = {name: np.concatenate(parts) for name, parts in columns.items()}
    pairs = {name: np.stack([keys["images"], column]) for name, column in keys.items()}
    hashes = {name: sha256(pair[:, np.lexsort(pair[::-1])].tobytes()).hexdigest() for name, pair in pairs.items()}
    train, val = map(len, data.split)
    tested = int((keys["split"] == TEST).sum())
    return {**hashes, "train": train, "val": val, "test": tested, "classes": data.class_count}


def _keys(items: Iterable[Any]) -> np.ndarray:
    """Return a hash of each item, an array or bytes, as uint64 (N,)."""
    return np.frombuffer(b"".join(sha256(item).digest()[:8] for item in items), np.uint64)
