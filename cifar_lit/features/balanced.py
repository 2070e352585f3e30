"""Epochs that show each class equally often."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.text import counted
from cifar_lit.data.loaders import Order, epoch_order

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

_CYCLES = 0  # number of this random stream; the order in `data.loaders` has 1


def balanced_order(labels: Tensor, seed: int, epoch: int) -> Tensor:
    """Return indices into `labels`, int64 (N,), of an epoch in which each class occurs equally often.

    The images of each class form a shuffled cycle, which an epoch continues where the previous epoch ended. In each
    epoch and over all epochs, any two images of a class occur equally often, plus or minus one. So do any two classes.
    """
    count = len(labels)
    permutation = np.random.default_rng([_CYCLES, seed]).permutation(count)
    by_class = permutation[np.argsort(labels.numpy()[permutation], kind="stable")]
    _, starts = np.unique(labels.numpy()[by_class], return_index=True)
    cycles = np.split(by_class, starts[1:])
    parts = []
    for number, cycle in enumerate(cycles):
        # Rounding both ends makes the classes add up to `count` in every epoch.
        begin = (count * epoch + number) // len(cycles)
        end = (count * (epoch + 1) + number) // len(cycles)
        parts.append(cycle[np.arange(begin, end) % len(cycle)])
    return torch.from_numpy(np.concatenate(parts))[epoch_order(count, seed, epoch)]


@final
class Balanced(Callback):
    """Show each class equally often in every epoch: images of rare classes are repeated, others take turns."""

    def __init__(self) -> None:
        self._counts = torch.empty(0)

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Count the training images of each class."""
        if stage == "fit":
            self._counts = trainer.datamodule.class_counts  # type: ignore[attr-defined]

    def order(self, labels: Tensor) -> Order:
        """Return an `Order` of balanced epochs. labels: int64 (N,) of the whole image set, on the CPU."""
        return lambda rows, seed, epoch: rows[balanced_order(labels[rows], seed, epoch)]

    def class_weights(self) -> Tensor:
        """Return weights that balance the classes in a loss over all images, float32 (classes,)."""
        counts = self._counts.clamp_min(1).float()
        return self._counts.sum() / (len(counts) * counts)

    def card(self) -> dict[str, str]:
        """Return the line of the start card."""
        fewest, most = self._counts.aminmax()
        return {"classes": f"{fewest:,} … {counted(int(most), 'training image')} each · shown equally often"}
