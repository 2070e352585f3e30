"""Metrics that are exact on any number of devices, and cheap enough to be taken in every training step.

To add a metric of the evaluation, name a torchmetrics class under `model.metrics`; it reaches the console, the CSV file,
TensorBoard, metrics.json and the report by the name that it has there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.utilities import dim_zero_cat


class MeanLoss(Metric):
    """The mean cross-entropy over images, the same to the last digit in whatever order and on whatever devices.

    torchmetrics' MeanMetric adds floats in the order in which they come, so its last digits depend on how images
    were shared out. Here each image's loss counts in whole units of 2⁻²⁰, and integers add up the same in any order.
    The rounding moves a mean by less than 5e-7. A loss that is not finite, or above a million, makes the result NaN.
    """

    full_state_update = False
    UNIT, MAX_LOSS = 2.0**-20, 2.0**20

    total: Tensor
    count: Tensor
    unusable: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count", "unusable"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Adds float32 losses (B,) where bool counted (B,) is true."""
        usable = (losses <= self.MAX_LOSS) & counted  # false for NaN
        self.total += torch.where(usable, losses / self.UNIT, 0.0).round().long().sum()
        self.count += counted.sum()
        self.unusable += (counted & ~usable).sum()

    def compute(self) -> Tensor:
        """The mean as a float32 scalar, NaN when a loss was not usable or no image was counted."""
        mean = self.total.float() * self.UNIT / self.count
        return torch.where(self.unusable > 0, torch.nan, mean)


class Score(NamedTuple):
    """How a net did on a set of images; accuracies are fractions, the loss is a mean over images.

    metrics: those of `model.metrics`, by name.
    """

    accuracy: float
    loss: float
    images: int
    per_class: list[float]
    confusion: list[list[int]]
    metrics: Mapping[str, float] = {}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> Score | None:
        """A score out of a checkpoint, of this version, an older or a newer one; None where there is none, or a part of one."""
        known = {name: value for name, value in (values or {}).items() if name in cls._fields}
        return cls(**known) if all(name in known or name in cls._field_defaults for name in cls._fields) else None

    def scalars(self, stage: str) -> dict[str, float]:
        """Everything that is one number, by the names that loggers and callbacks know it by, such as `val/accuracy`."""
        values = {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}
        return {f"{stage}/{name}": value for name, value in values.items()}


class Evaluation(nn.Module):
    """Loss, confusion matrix and further metrics of one pass over a set; accuracies follow from the matrix's whole numbers."""

    def __init__(self, num_classes: int, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__()
        self.loss = MeanLoss()
        self.confusion = MulticlassConfusionMatrix(num_classes, ignore_index=-1, validate_args=False)
        self.metrics = MetricCollection({name: metric.clone() for name, metric in (metrics or {}).items()}, compute_groups=False)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Counts logits (B, classes) against int64 labels (B,); labels of -1 are padding and do not count."""
        counted = labels >= 0
        self.loss.update(F.cross_entropy(logits.float(), labels.clamp_min(0), reduction="none"), counted)
        self.confusion.update(logits, labels)
        if len(self.metrics) and bool(counted.all()):  # padding comes in whole batches
            self.metrics.update(logits, labels)

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
            metrics={name: float(value) for name, value in self.metrics.compute().items()} if len(self.metrics) else {},
        )

    def reset(self) -> None:
        """Forgets all images."""
        self.loss.reset()
        self.confusion.reset()
        self.metrics.reset()


class RunningMetrics:
    """Loss and accuracy of the training steps since the last logged row, summed on the device without waiting for it.

    loss, hits: float32 scalars. images: their number, counted by the host. non_finite: 1 once a loss was NaN or infinite;
    finite_steps: how many steps came before that one. epoch: loss, hits and images of all devices in the rows of this epoch.
    batches: how many there were since that row, the same on every device, also where one had no image of a batch.
    """

    def __init__(self, device: torch.device, loss: float = 0.0, hits: float = 0.0, images: float = 0) -> None:
        self.loss, self.hits = torch.tensor(loss, device=device), torch.tensor(hits, device=device)
        self.images = int(images)
        self.non_finite, self.finite_steps = torch.zeros((), device=device), torch.zeros((), device=device)
        self.epoch = [0.0, 0.0, 0.0]
        self.batches = 0

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Adds the mean loss and the hits of a batch: logits (B, classes) for int64 labels (B,)."""
        self.loss.add_(loss, alpha=len(labels))
        self.hits.add_((logits.argmax(1) == labels).sum())

    def watch(self, loss: Tensor) -> None:
        """Remembers, on the device, whether this or an earlier loss was not finite."""
        self.non_finite.copy_(torch.maximum(self.non_finite, 1.0 - loss.isfinite().float()))
        self.finite_steps.add_(1.0 - self.non_finite)

    def sums(self) -> Tensor:
        """Loss, hits and images, float32 (3,), of this device."""
        return torch.stack((self.loss, self.hits, self.hits.new_tensor(self.images)))

    def start_row(self) -> None:
        """Forgets what was logged."""
        self.loss.zero_()
        self.hits.zero_()
        self.finite_steps.zero_()
        self.images = self.batches = 0

    def epoch_means(self) -> tuple[float, float]:
        """Mean training loss and accuracy over the epoch so far, all devices together."""
        loss, hits, images = self.epoch
        return (loss / images, hits / images) if images else (float("nan"), float("nan"))


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

        In float64, logits that differ stay different, so that the likeliest class is the one that was counted.
        """
        indices, labels, logits = (dim_zero_cat(state).cpu() for state in (self.indices, self.labels, self.logits))
        counted = labels >= 0  # chosen here, as choosing by value would have made each batch wait
        order = indices[counted].argsort()
        rows = torch.arange(len(labels))[counted][order]
        return {"indices": indices[rows], "labels": labels[rows], "probabilities": logits[rows].double().softmax(1)}

    def predictions(self) -> dict[str, Tensor]:
        """What `compute` returns, with one row also for a single image, of which torchmetrics makes scalars."""
        values: dict[str, Tensor] = self.compute()
        return {**values, "indices": values["indices"].reshape(-1), "labels": values["labels"].reshape(-1)}


def total_norm(parameters: Iterable[Tensor]) -> float:
    """The 2-norm of all parameters together."""
    norms = torch._foreach_norm([parameter.detach() for parameter in parameters])
    return float(torch.stack([norm.float() for norm in norms]).norm())
