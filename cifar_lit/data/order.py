"""Orders of the training images in an epoch, as functions of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_ORDER = 1  # number of this random stream; `features.balanced` has 0, `data.augment` 4

Order = Callable[[Tensor, int, int], Tensor]  # from rows, seed and epoch to the rows in order


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of `count` image indices, int64 (count,), as a function of (seed, epoch)."""
    return torch.from_numpy(np.random.default_rng([_ORDER, seed, epoch]).permutation(count))


def shuffled(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows, int64 (N,), in a new random order for each epoch."""
    return rows[epoch_order(len(rows), seed, epoch)]


def in_order(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows unchanged."""
    return rows
