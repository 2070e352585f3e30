"""`data.sampling balanced`: epochs that show each class equally often."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cifar_lit.data.order import Order, epoch_order
from cifar_lit.errors import UsageError, check_choice

SAMPLINGS = ("none", "balanced")

_CYCLES = 0  # number of this random stream; `data.order` has 1, `data.augment` 4


def balanced(labels: Tensor) -> Order:
    """Return an `Order` of balanced epochs. labels: int64 (N,) of the whole image set, on the CPU."""
    return lambda rows, seed, epoch: rows[balanced_order(labels[rows], seed, epoch)]


def check_balanced(sampling: str, shuffle: bool) -> None:
    """Raise UsageError for an unknown `data.sampling`, and for `balanced` without shuffling."""
    check_choice("data.sampling", sampling, SAMPLINGS)
    if sampling == "balanced" and not shuffle:
        raise UsageError("data.sampling balanced draws a new order every epoch: leave data.shuffle at true")


def balanced_order(labels: Tensor, seed: int, epoch: int) -> Tensor:
    """Return indices into `labels`, int64 (N,), of an epoch in which each class occurs equally often.

    The images of each class form a shuffled cycle, which an epoch continues where the previous epoch ended. In each
    epoch and over all epochs, any two images of a class occur equally often, plus or minus one. So do any two classes.
    """
    count = len(labels)
    shuffled = np.random.default_rng([_CYCLES, seed]).permutation(count)
    by_class = shuffled[np.argsort(labels.numpy()[shuffled], kind="stable")]
    _, starts = np.unique(labels.numpy()[by_class], return_index=True)
    cycles = np.split(by_class, starts[1:])
    parts = []
    for number, cycle in enumerate(cycles):
        # Rounding both ends makes the classes add up to `count` in every epoch.
        begin = (count * epoch + number) // len(cycles)
        end = (count * (epoch + 1) + number) // len(cycles)
        parts.append(cycle[np.arange(begin, end) % len(cycle)])
    return torch.from_numpy(np.concatenate(parts))[epoch_order(count, seed, epoch)]
