"""Orders in which an epoch shows training images, as functions of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_ORDER = 1  # number of this stream of random numbers; `data.balanced` has 0, `data.augment` 2 and 3

Order = Callable[[Tensor, int, int], Tensor]  # from rows, seed and epoch to rows in the order of that epoch


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of `count` image indices, int64 (count,), as a function of (seed, epoch)."""
    return torch.from_numpy(np.random.default_rng([_ORDER, seed, epoch]).permutation(count))


def shuffled(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows, int64 (N,), in random order, a new one for each epoch."""
    return rows[epoch_order(len(rows), seed, epoch)]


def in_order(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows as they are, the same in every epoch."""
    return rows
