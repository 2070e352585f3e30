"""Class weights in the training loss, for unequal classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.errors import check_choice

if TYPE_CHECKING:
    from cifar_lit.data.image_set import Batch
    from cifar_lit.training.classifier import ImageClassifier

KINDS = ("balanced", "effective")
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


@final
class ClassWeights(Callback):
    """Multiply the training loss of each image by the weight of its class, then divide by the number of images.

    `F.cross_entropy(weight=…)` would divide by the sum of the weights on this device. It would also weigh the smoothed
    part of the labels, which favours rare classes.

    Args:
        kind: balanced (1 / number of training images), or effective (1 / effective number of images, a weaker
            correction).

    Attributes:
        weights: float32 (classes,), set before a fit starts.
    """

    def __init__(self, kind: str = "balanced") -> None:
        check_choice("class_weights.kind", kind, KINDS)
        self._kind = kind
        self.weights = torch.empty(0)

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Count the training images of each class."""
        if stage != "fit":
            return
        counts = trainer.datamodule.class_counts  # type: ignore[attr-defined]
        pl_module.class_balance = torch.tensor(class_weights(counts, self._kind))
        self.weights = pl_module.class_balance.to(trainer.strategy.root_device)
        pl_module.loss.changes.append(self.weigh)

    def weigh(self, losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Return the weighted losses (B,) of a batch. Several labels have their mean weight, none has 1."""
        shares = batch.targets
        if batch.labels.ndim == 2:
            shares = (batch.labels if shares is None else shares).clamp_min(0)
            return losses * (shares @ self.weights / shares.sum(1)).nan_to_num(1.0)
        if shares is None:
            return losses * self.weights[batch.labels]
        return losses * (shares @ self.weights)
