"""Metrics that are exact on any number of devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.utilities import dim_zero_cat


class MeanLoss(Metric):
    """The mean cross-entropy over images, the same to the last digit in whatever order and on whatever devices.

    torchmetrics' MeanMetric adds floats in the order in which they come, so its last digits depend on how images
    were shared out. Here each image's loss counts in whole units of 2⁻²⁰, and integers add up the same in any order.
    The rounding moves a mean by less than 5e-7. A loss that is not finite, or above a million, makes the result NaN:
    larger ones could overflow the sum, and say no more than that the net has diverged.
    """

    full_state_update = False
    UNIT, LARGEST = 2.0**-20, 2.0**20

    total: Tensor
    count: Tensor
    broken: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count", "broken"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Adds float32 losses (B,) where bool counted (B,) is true."""
        usable = (losses <= self.LARGEST) & counted  # false for NaN
        self.total += torch.where(usable, losses / self.UNIT, 0.0).round().long().sum()
        self.count += counted.sum()
        self.broken += (counted & ~usable).sum()

    def compute(self) -> Tensor:
        """The mean as a float32 scalar, NaN when a loss was not usable or no image was counted."""
        mean = self.total.float() * self.UNIT / self.count
        return torch.where(self.broken > 0, torch.nan, mean)


class Score(NamedTuple):
    """How a net did on a set of images; accuracies are fractions, the loss is a mean over images."""

    accuracy: float
    loss: float
    images: int
    per_class: list[float]
    confusion: list[list[int]]


class Evaluation(nn.Module):
    """Loss and confusion matrix of one pass over a set; every accuracy follows from the matrix's whole numbers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.loss = MeanLoss()
        self.confusion = MulticlassConfusionMatrix(num_classes, ignore_index=-1, validate_args=False)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Counts logits (B, classes) against int64 labels (B,); labels of -1 are padding and do not count."""
        losses = F.cross_entropy(logits.float(), labels.clamp_min(0), reduction="none")
        self.loss.update(losses, labels >= 0)
        self.confusion.update(logits, labels)

    def compute(self) -> Score:
        """The score over all devices."""
        matrix = self.confusion.compute().long().cpu()
        hits, counts = matrix.diag(), matrix.sum(1)
        images = int(counts.sum())
        return Score(
            accuracy=int(hits.sum()) / images if images else float("nan"),
            loss=round(float(self.loss.compute()), 6),
            images=images,
            per_class=[int(hit) / int(count) if count else float("nan") for hit, count in zip(hits, counts, strict=True)],
            confusion=matrix.tolist(),
        )

    def reset(self) -> None:
        """Forgets all images."""
        self.loss.reset()
        self.confusion.reset()


def total_norm(parameters: Iterable[Tensor]) -> float:
    """The 2-norm of all parameters together."""
    norms = torch._foreach_norm([parameter.detach() for parameter in parameters])
    return float(torch.stack([norm.float() for norm in norms]).norm())


# ---- What a net made of each image, gathered on its device while it is scored.


class PredictionCollector(Metric):
    """The logits of every image that a pass over a set looked at, once each and in the order of the set.

    A batch is only noted, without waiting for the device; several processes put theirs together at the end. Until then an
    image takes four bytes a class there.
    """

    full_state_update = False

    indices: list[Tensor]
    labels: list[Tensor]
    logits: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("indices", "labels", "logits"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Notes logits (B, classes) of images with int64 labels (B,), -1 for padding, and int64 rows (B,) of their set."""
        self.indices.append(indices)
        self.labels.append(labels)
        self.logits.append(logits.detach().float())  # not every way between processes knows bfloat16

    def compute(self) -> dict[str, Tensor]:
        """`indices` and `labels` int64 (N,), `probabilities` float64 (N, classes) over all devices, on the CPU, by index.

        In float64, logits that differ stay different, so that the likeliest class is the one that was counted. Of a single
        image torchmetrics hands the first two out as scalars: see `rows`.
        """
        indices, labels, logits = (dim_zero_cat(state).cpu() for state in (self.indices, self.labels, self.logits))
        counted = labels >= 0  # chosen here, as choosing by value would have made each batch wait
        order = indices[counted].argsort()
        rows = torch.arange(len(labels))[counted][order]
        return {"indices": indices[rows], "labels": labels[rows], "probabilities": logits[rows].double().softmax(1)}

    def rows(self) -> dict[str, Tensor]:
        """What `compute` finds, with a row an image also where there is only one."""
        found: dict[str, Tensor] = self.compute()
        return {**found, "indices": found["indices"].reshape(-1), "labels": found["labels"].reshape(-1)}
