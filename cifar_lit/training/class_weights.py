"""Class weights in the training loss (`model.class_weights`), for unequal classes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.errors import UsageError

CLASS_WEIGHTS = ("none", "balanced", "effective")
BETA = 0.999  # value of Cui et al. for ImageNet and iNaturalist


def class_weights(counts: Tensor, kind: str) -> list[float]:
    """Return the weight of each class; their mean over all training images is 1. Classes without images get 0.

    Args:
        counts: number of training images of each class, int64 (classes,).
        kind: `balanced` (1 / count) or `effective` (1 / effective number of samples, (1 − βⁿ) / (1 − β); Cui et al.,
            Class-Balanced Loss, CVPR 2019).
    """
    sizes = counts.double() if kind == "balanced" else (1 - BETA ** counts.double()) / (1 - BETA)
    weights = torch.where(counts > 0, 1 / sizes, 0.0)
    return (weights * (counts.sum() / (weights * counts).sum())).tolist()


class ClassWeights(Callback):
    """Multiply the training loss of each image by the weight of its class, then divide by the number of images.

    `F.cross_entropy(weight=…)` would divide by the sum of the weights on this device. It would also weigh the smoothed
    part of the labels, which favours rare classes.

    Attributes:
        weights: float32 (classes,), set when a fit starts.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.weights = torch.empty(0)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Count the training images of each class. Raise UsageError if the datamodule cannot."""
        counts = getattr(trainer.datamodule, "class_counts", None)  # type: ignore[attr-defined]
        if counts is None:
            raise UsageError(
                f"model.class_weights {self._kind} needs class_counts of the datamodule: define it, or use none"
            )
        self.weights = torch.tensor(class_weights(counts, self._kind), device=pl_module.device)
        pl_module.loss_hooks.append(self._weigh)

    def _weigh(self, losses: Tensor, logits: Tensor, batch: Any) -> Tensor:
        targets = getattr(batch, "targets", None)
        return losses * (self.weights[batch[1]] if targets is None else targets @ self.weights)
