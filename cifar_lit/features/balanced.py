"""Epochs that show each class equally often."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.data.loaders import TrainLoader, epoch_order

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
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

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Set the order of the training images; raise UsageError if another feature sets it or balances the classes."""
        if stage != "fit":
            return
        data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
        if pl_module.class_balance is not None:
            raise UsageError("balanced balances the classes, as another feature does: leave one of them out")
        if data.make_train_loader is not TrainLoader:
            raise UsageError("balanced sets the order of the images, as another feature does: leave one of them out")
        labels = data.train_images.labels

        def order(rows: Tensor, seed: int, epoch: int) -> Tensor:
            return rows[balanced_order(labels[rows], seed, epoch)]

        data.make_train_loader = partial(TrainLoader, order=order)
        counts = data.class_counts
        pl_module.class_balance = counts.sum() / (len(counts) * counts.clamp_min(1).float())
