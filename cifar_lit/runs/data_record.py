"""The `data` entry of metrics.json, which identifies the images that a run was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import torch

from cifar_lit.data.split_images import TEST

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.data.image_set import ImageSet


def data_record(data: ImageData) -> dict[str, object]:
    """Return SHA-256 fingerprints of images, labels and split, and the numbers of images and classes.

    Each image is identified by its pixels. So a fingerprint does not depend on the order, names or place of the files,
    and other labels change only that of the labels, unless a split by seed changes with them.
    """
    images, labels, split = [], [], []  # uint64 (N,), a key per image
    for image_set, sides in data.parts.sides():
        names = _keys(name.encode() for name in image_set.classes)
        images.append(image_keys(image_set))
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


def image_keys(images: ImageSet) -> np.ndarray:
    """Return a hash of the pixels of each image, uint64 (N,)."""
    keys = [np.zeros(0, np.uint64)]
    for rows in torch.arange(len(images)).split(4096):  # in parts, because the images may be memory-mapped
        keys.append(_keys(images.take(rows).flatten(1).numpy()))
    return np.concatenate(keys)


def _keys(items: Iterable[Buffer]) -> np.ndarray:
    """Return a hash of each item, an array or bytes, as uint64 (N,)."""
    return np.frombuffer(b"".join(sha256(item).digest()[:8] for item in items), np.uint64)


def _fingerprint(images: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of the pairs of an image's key and its value, in the order of the keys."""
    pairs = np.stack([np.concatenate(images), np.concatenate(values)])
    return sha256(pairs[:, np.lexsort(pairs[::-1])].tobytes()).hexdigest()
