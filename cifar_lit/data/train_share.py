"""`data.train_share`: train on a stratified share of the training images. Smaller shares are part of larger ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cifar_lit.errors import UsageError


def check_share(share: float) -> None:
    """Raise UsageError unless a share is valid."""
    if not 0 < share <= 1:
        raise UsageError(f"data.train_share is a share of the training images, above 0 and at most 1, not {share:g}")


def take_share(rows: Tensor, labels: Tensor, share: float, seed: int, groups: Tensor | None = None) -> Tensor:
    """Return a share of `rows`, int64, in their order.

    Every class keeps about this share of its images, and at least one image or group. Groups stay whole.

    Args:
        rows: int64 (N,).
        labels: labels of these rows, int64 (N,).
        share: above 0 and at most 1. All rows are returned for 1.
        seed: seed of the draw.
        groups: groups of these rows, int64 (N,), equal for images that must stay together.
    """
    if share == 1:
        return rows
    count = len(rows)
    classes = labels.numpy()
    units = np.arange(count) if groups is None else np.unique(groups.numpy(), return_inverse=True)[1]
    order = np.random.default_rng(seed).permutation(count)[units]
    by_class = np.lexsort((order, classes))
    ranks = np.empty(count, np.int64)  # of each row within its class
    ranks[by_class] = np.arange(count) - np.searchsorted(classes[by_class], classes[by_class])
    counts = np.bincount(classes)
    rounding = (np.arange(len(counts)) + 0.5) / len(counts)  # half of the classes round up, half down
    positions = (ranks + rounding[classes]) / counts[classes]
    # A unit is taken as a whole, by its mean position. The first unit of each class is always taken.
    means = np.bincount(units, positions) / np.bincount(units)
    means[units[ranks == 0]] = 0
    return rows[torch.from_numpy(means[units] < share)]
