"""Metrics that are exact on any number of devices and cheap enough for every training step.

`Evaluation` counts one pass over a set and computes a `Score`. The *values* of a score are its numbers by name: those of this
module, and those of the torchmetrics classes that `model.metrics` names. All of them reach the console, the CSV file,
TensorBoard, metrics.json and the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from cifar_lit.errors import UsageError
from cifar_lit.text import csv_cell, is_name


class MeanLoss(Metric):
    """The mean loss over images, with the same bits in whatever order and on whatever devices they are counted.

    Each loss is rounded to a multiple of 2⁻²⁰, and integers add up exactly, where torchmetrics' MeanMetric adds floats. The
    rounding changes a mean by less than 5e-7. The result is NaN if a loss is not finite or above a million.
    """

    full_state_update = False
    UNIT, MAX_LOSS = 2.0**-20, 2.0**20

    sums: Tensor  # int64 (3,): units of loss, images, and losses that were not usable

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Add float32 losses (B,) where bool counted (B,) is true."""
        usable = (losses <= self.MAX_LOSS) & counted  # false for NaN
        units = torch.where(usable, losses / self.UNIT, 0.0).round().long()
        self.sums += torch.stack((units, counted.long(), (counted & ~usable).long())).sum(1)

    def compute(self) -> Tensor:
        """Return the mean, a float32 scalar; NaN if a loss was not usable or no image was counted."""
        total, count, unusable = self.sums
        return torch.where(unusable > 0, torch.nan, total.float() * self.UNIT / count)


TOP = 5  # likeliest classes that may contain an image's own; scored if there are more classes than that


class TopHits(Metric):
    """The number of images with fewer than TOP classes likelier than their own.

    Ties count as hits on every device, where the order of `topk` depends on the device. An image whose own logit is NaN is no
    hit.
    """

    full_state_update = False

    hits: Tensor  # int64 scalar

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count float32 logits (B, classes) against int64 labels (B,). Labels of -1 are padding."""
        own = logits.gather(1, labels.clamp_min(0)[:, None])
        self.hits += (((logits <= own).sum(1) > logits.shape[1] - TOP) & (labels >= 0)).sum()

    def compute(self) -> Tensor:
        """Return the number, an int64 scalar."""
        return self.hits


class Score(NamedTuple):
    """How a net did on a set of images. Accuracies are fractions; the loss is a mean over images.

    Args:
        per_class: the accuracy of each class, NaN for a class without images.
        confusion: images by class (rows) and predicted class (columns).
        further: the values of `model.metrics`.
        top5: the fraction of images whose class is among the TOP likeliest; None if there are no more classes than that.
    """

    accuracy: float
    loss: float
    images: int
    per_class: list[float]
    confusion: list[list[int]]
    further: Mapping[str, float] = {}
    top5: float | None = None

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any] | None, num_classes: int) -> Score | None:
        """Return the score saved in a checkpoint, None if it is missing or invalid for so many classes."""
        try:
            fields = dict(saved or {})
            matrix = torch.as_tensor(fields["confusion"], dtype=torch.int64).view(num_classes, num_classes).clamp_min(0)
            per_class = torch.tensor(fields["per_class"], dtype=torch.float64).view(num_classes)
            further = {str(name): float(value) for name, value in fields["further"].items()}
            accuracy, loss, counted = float(fields["accuracy"]), float(fields["loss"]), int(fields["images"])
            top5 = None if fields["top5"] is None else float(fields["top5"])
            return cls(accuracy, loss, counted, per_class.tolist(), matrix.tolist(), further, top5)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RuntimeError,
        ):  # a file may hold anything
            return None

    @property
    def balanced_accuracy(self) -> float:
        """The mean accuracy of the classes that have images; 1/C for guessing among C classes."""
        return round(float(torch.tensor(self.per_class, dtype=torch.float64).nanmean()), 6)

    @property
    def macro_f1(self) -> float:
        """The mean F1 (harmonic mean of precision and recall) of the classes that have images or were predicted."""
        matrix = torch.tensor(self.confusion, dtype=torch.float64).view(2 * [len(self.confusion)])
        return round(float((2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1))).nanmean()), 6)

    @property
    def values(self) -> dict[str, float]:
        """All numbers of the score by name. One of `model.metrics` replaces ours of the same name."""
        own = {"accuracy": self.accuracy, "loss": self.loss}
        own |= {"balanced_accuracy": self.balanced_accuracy, "macro_f1": self.macro_f1}
        return own | ({} if self.top5 is None else {"top5": self.top5}) | dict(self.further)

    def logged(self, stage: str) -> dict[str, float]:
        """Return the values by the names that loggers and callbacks use, such as `val/accuracy`."""
        return {f"{stage}/{name}": value for name, value in self.values.items()}


# Names in metrics.json that a further metric cannot have.
TAKEN = ("accuracy", "loss", "images", "interval", "per_class", "tta", "calibration", "fingerprint")


def value_names(num_classes: int, further: Iterable[str] = ()) -> list[str]:
    """Return the names of the values in a score. further: names of `model.metrics`."""
    top5 = ["top5"] if num_classes > TOP else []
    return list(dict.fromkeys(["accuracy", "loss", "balanced_accuracy", "macro_f1", *top5, *further]))


class Evaluation(nn.Module):
    """Loss, confusion matrix, top-5 hits and further metrics of one pass over a set.

    Accuracies and F1 follow from the matrix, which is counted in integers.
    """

    def __init__(self, num_classes: int, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__()
        for name in metrics or {}:
            if not is_name(name) or csv_cell(name) != name or name in TAKEN or "." in name:
                raise UsageError(
                    f"model.metrics: nothing can be called {name!r} beside the values of metrics.json: rename it"
                )
        self.loss = MeanLoss()
        self.confusion = MulticlassConfusionMatrix(num_classes, ignore_index=-1, validate_args=False)
        self.top5 = TopHits() if num_classes > TOP else None
        self.further = MetricCollection(
            {name: metric.clone() for name, metric in (metrics or {}).items()}, compute_groups=False
        )

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count logits (B, classes) against int64 labels (B,). Labels of -1 are padding."""
        counted, logits = labels >= 0, logits.float()  # probabilities in bfloat16 would be ties
        self.loss.update(F.cross_entropy(logits, labels.clamp_min(0), reduction="none"), counted)
        self.confusion.update(logits, labels)
        if self.top5 is not None:
            self.top5.update(logits, labels)
        if not len(self.further):
            return
        if len(labels) and bool(counted.all()):  # padding comes in whole batches
            self.further.update(logits, labels)
            return
        for metric in self.further.values():
            if any(isinstance(state, list) for state in metric._defaults.values()):
                # torchmetrics gathers lists, and needs one of the same rank and dtype from each device
                metric.update(logits[:0], labels[:0])

    def compute(self) -> Score:
        """Return the score over all devices (collective: every rank must call this)."""
        matrix = self.confusion.compute().long().cpu()
        hits, counts = matrix.diag(), matrix.sum(1)
        return Score(
            accuracy=float(hits.sum().double() / counts.sum()),
            loss=round(float(self.loss.compute()), 6),
            images=int(counts.sum()),
            per_class=(hits.double() / counts).tolist(),
            confusion=matrix.tolist(),
            further={name: float(value) for name, value in self.further.compute().items()} if len(self.further) else {},
            top5=None if self.top5 is None else float(self.top5.compute().cpu().double() / counts.sum()),
        )

    @property
    def names(self) -> list[str]:
        """Names of the values in a score."""
        return value_names(self.confusion.num_classes, map(str, self.further))

    def reset(self) -> None:
        """Start counting anew."""
        for metric in (self.loss, self.confusion, self.top5, self.further):
            if metric is not None:
                metric.reset()


class RunningMetrics:
    """Loss and accuracy of the training steps since the last logged row, summed on the device without synchronising it.

    Attributes:
        loss, hits: float32 scalars.
        images: their number, counted on the host.
        batches: batches since that row, equal on all devices, also on one without images of a batch.
        non_finite: 1 once a loss was NaN or infinite, a float32 scalar.
        finite_steps: batches before that one, a float32 scalar.
        epoch: loss, hits and images of all devices in this epoch's rows.
    """

    def __init__(self, device: torch.device, loss: float = 0.0, hits: float = 0.0, images: float = 0) -> None:
        self.loss, self.hits, self.non_finite, self.finite_steps = (
            torch.tensor(value, device=device) for value in (loss, hits, 0.0, 0.0)
        )
        self.images, self.batches = int(images), 0
        self.epoch = [0.0, 0.0, 0.0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a step changes."""
        return self.loss, self.hits, self.non_finite, self.finite_steps

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add the mean loss, detached, and the hits of a batch: logits (B, classes), int64 labels (B,)."""
        self.loss.add_(loss, alpha=len(labels))
        self.hits.add_(logits.argmax(1).eq_(labels).sum())

    def watch(self, loss: Tensor) -> None:
        """Record on the device whether this loss is not finite."""
        self.non_finite.copy_(torch.maximum(self.non_finite, 1.0 - loss.isfinite().float()))
        self.finite_steps.add_(1.0 - self.non_finite)

    def sums(self) -> Tensor:
        """Return loss, hits and images of this device, and whether a loss was not finite: float32 (4,)."""
        return torch.stack((self.loss, self.hits, self.hits.new_tensor(self.images), self.non_finite))

    def start_row(self) -> None:
        """Reset what was logged."""
        for tensor in (self.loss, self.hits, self.finite_steps):
            tensor.zero_()
        self.images = self.batches = 0

    def epoch_means(self) -> tuple[float, float]:
        """Return mean training loss and accuracy over the epoch so far, of all devices."""
        loss, hits, images = self.epoch
        return (loss / images, hits / images) if images else (float("nan"), float("nan"))
