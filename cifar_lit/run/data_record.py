"""The `data` entry of metrics.json, which identifies the images that a run was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from cifar_lit.data.split_images import TEST, hashes, image_hashes

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData


def data_record(data: ImageData) -> dict[str, object]:
    """Return SHA-256 fingerprints of images, labels and split, and the numbers of images and classes.

    Each image is identified by its pixels. So a fingerprint does not depend on the order, names or place of the files,
    and other labels change only that of the labels, unless a split by seed changes with them.
    """
    images, labels, split = [], [], []  # uint64 (N,), a key per image
    for image_set, sides in data.parts.sides():
        names = hashes(name.encode() for name in image_set.classes)
        images.append(image_hashes(image_set))
        labels.append(names[image_set.labels.numpy()])
        split.append(sides.numpy().astype(np.uint64))
    train, val = data.split
    return {
        "images": _fingerprint(images, images),
        "labels": _fingerprint(images, labels),
        "split": _fingerprint(images, split),
        "train": len(train),
        "val": len(val),
        "test": int((np.concatenate(split) == TEST).sum()),
        "classes": data.class_count,
    }


def _fingerprint(images: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of the pairs of an image's key and its value, in the order of the keys."""
    pairs = np.stack([np.concatenate(images), np.concatenate(values)])
    return sha256(pairs[:, np.lexsort(pairs[::-1])].tobytes()).hexdigest()
