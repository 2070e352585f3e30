"""Class weights in the training loss, for unequal classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

if TYPE_CHECKING:
    from cifar_lit.data.image_set import Batch
    from cifar_lit.training.classifier import ImageClassifier


def class_weights(counts: Tensor) -> Tensor:
    """Return the weight of each class, float32 (classes,), from its number of training images, int64 (classes,).

    It is proportional to 1 / number, with a mean of 1 over all training images. Classes without images get 0.
    """
    weights = counts.sum() / (counts > 0).sum() / counts
    return torch.where(counts > 0, weights, 0.0)


@final
class ClassWeights(Callback):
    """Multiply the training loss of each image by the weight of its class, then divide by the number of images.

    `F.cross_entropy(weight=…)` would divide by the sum of the weights on this device. It would also weigh the smoothed
    part of the labels, which favours rare classes.

    Attributes:
        weights: float32 (classes,), set before a fit starts.
    """

    weights: Tensor

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Count the training images of each class."""
        if stage != "fit":
            return
        pl_module.class_balance = class_weights(trainer.datamodule.class_counts)  # type: ignore[attr-defined]
        self.weights = pl_module.class_balance.to(trainer.strategy.root_device)
        pl_module.loss.changes.append(self.weigh)

    def weigh(self, losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Return the weighted losses (B,) of a batch. Several labels have their mean weight, none has 1."""
        shares = batch.labels if batch.targets is None else batch.targets
        if shares.ndim == 1:
            return losses * self.weights[shares]
        shares = shares.clamp_min(0)
        return losses * (shares @ self.weights / shares.sum(1)).nan_to_num(1.0)
