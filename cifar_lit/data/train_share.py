"""`data.split.share`: train on a stratified share of the training images. Smaller shares are part of larger ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cifar_lit.data.image_set import ImageSet


def take_share(images: ImageSet, rows: Tensor, share: float, seed: int) -> Tensor:
    """Return a share of `rows`, int64, in their order.

    Every class keeps about this share of its images, and at least one image or group. Groups stay whole.

    Args:
        images: the images that `rows` refer to.
        rows: int64 (N,).
        share: above 0 and at most 1. All rows are returned for 1.
        seed: seed of the draw.
    """
    if share == 1:
        return rows
    count, classes = len(rows), images.labels[rows].numpy()
    units = np.arange(count) if images.groups is None else np.unique(images.groups[rows], return_inverse=True)[1]
    order = np.random.default_rng(seed).permutation(count)[units]
    by_class = np.lexsort((order, classes))
    ranks = np.empty(count, np.int64)  # position of each row within its class
    ranks[by_class] = np.arange(count) - np.searchsorted(classes[by_class], classes[by_class])
    counts = np.bincount(classes)
    rounding = (np.arange(len(counts)) + 0.5) / len(counts)  # half of the classes round up, half down
    positions = (ranks + rounding[classes]) / counts[classes]
    # A unit is taken as a whole, by its mean position. The first unit of each class is always taken.
    means = np.bincount(units, positions) / np.bincount(units)
    means[units[ranks == 0]] = 0
    return rows[torch.from_numpy(means[units] < share)]
