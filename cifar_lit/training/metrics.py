"""Metrics that are exact on any number of devices, and cheap enough to be taken in every training step.

To add a metric of the evaluation, name a torchmetrics class under `model.metrics`; it reaches the console, the CSV file,
TensorBoard, metrics.json and the report by the name that it has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.utilities import dim_zero_cat

from cifar_lit.errors import UsageError
from cifar_lit.text import csv_cell, is_name


class MeanLoss(Metric):
    """The mean loss over images, the same to the last digit in whatever order and on whatever devices.

    Each image's loss counts in whole units of 2⁻²⁰, and integers add up the same in any order, where torchmetrics' MeanMetric
    adds floats as they come. The rounding moves a mean by less than 5e-7. A loss that is not finite, or above a million, makes
    the result NaN.
    """

    full_state_update = False
    UNIT, MAX_LOSS = 2.0**-20, 2.0**20

    sums: Tensor  # int64 (3,): units of loss, images, and losses that were not usable

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Adds float32 losses (B,) where bool counted (B,) is true."""
        usable = (losses <= self.MAX_LOSS) & counted  # false for NaN
        units = torch.where(usable, losses / self.UNIT, 0.0).round().long()
        self.sums += torch.stack((units, counted.long(), (counted & ~usable).long())).sum(1)

    def compute(self) -> Tensor:
        """The mean as a float32 scalar, NaN when a loss was not usable or no image was counted."""
        total, count, unusable = self.sums
        return torch.where(unusable > 0, torch.nan, total.float() * self.UNIT / count)


TOP = 5  # likeliest classes among which an image's own counts as a hit of `top5`; scored where there are more classes


class TopHits(Metric):
    """How many images have fewer than TOP classes that are likelier than their own, counted in whole numbers.

    So ties count as hits, on every device alike, where `topk` breaks them as it comes. An image whose own logit is NaN is none.
    """

    full_state_update = False

    hits: Tensor  # int64 scalar

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Counts float32 logits (B, classes) against int64 labels (B,); labels of -1 are padding and do not count."""
        own = logits.gather(1, labels.clamp_min(0)[:, None])
        self.hits += (((logits <= own).sum(1) > logits.shape[1] - TOP) & (labels >= 0)).sum()

    def compute(self) -> Tensor:
        """Their number."""
        return self.hits


class Score(NamedTuple):
    """How a net did on a set of images; accuracies are fractions, the loss is a mean over images.

    top5: the fraction of images with their class among the TOP likeliest; None where there are no more classes than that.
    """

    accuracy: float
    loss: float
    images: int
    per_class: list[float]
    confusion: list[list[int]]
    metrics: Mapping[str, float] = {}  # those of `model.metrics`
    top5: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None, num_classes: int) -> Score | None:
        """Return the score in a checkpoint, or None if it is missing, damaged or of another number of classes."""
        try:
            known = dict(values or {})
            matrix = torch.as_tensor(known["confusion"], dtype=torch.int64).view(num_classes, num_classes).clamp_min(0)
            per_class = torch.tensor(known["per_class"], dtype=torch.float64).view(num_classes)
            metrics = {str(name): float(value) for name, value in known["metrics"].items()}
            accuracy, loss, counted = float(known["accuracy"]), float(known["loss"]), int(known["images"])
            top5 = None if known["top5"] is None else float(known["top5"])
            return cls(accuracy, loss, counted, per_class.tolist(), matrix.tolist(), metrics, top5)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError):  # whatever a foreign file leads to
            return None

    @property
    def balanced_accuracy(self) -> float:
        """The mean of the classes' accuracies, of those that have images: guessing among C classes gives 1/C."""
        return round(float(torch.tensor(self.per_class, dtype=torch.float64).nanmean()), 6)

    @property
    def macro_f1(self) -> float:
        """The mean of the classes' F1, the harmonic mean of precision and recall; of those that have images or were predicted."""
        matrix = torch.tensor(self.confusion, dtype=torch.float64).view(2 * [len(self.confusion)])
        return round(float((2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1))).nanmean()), 6)

    @property
    def figures(self) -> dict[str, float]:
        """Everything that is one number, by name; one of `model.metrics` may have the name of ours, and takes its place."""
        own = {"accuracy": self.accuracy, "loss": self.loss}
        own |= {"balanced_accuracy": self.balanced_accuracy, "macro_f1": self.macro_f1}
        return own | ({} if self.top5 is None else {"top5": self.top5}) | dict(self.metrics)

    def scalars(self, stage: str) -> dict[str, float]:
        """The figures by the names that loggers and callbacks know them by, such as `val/accuracy`."""
        return {f"{stage}/{name}": value for name, value in self.figures.items()}


# names in metrics.json that no further metric can have
TAKEN = ("accuracy", "loss", "images", "interval", "per_class", "tta", "calibration", "fingerprint")


class Evaluation(nn.Module):
    """Loss, confusion matrix, hits among the likeliest and further metrics of one pass over a set.

    Accuracies and F1 follow from the matrix's whole numbers.
    """

    def __init__(self, num_classes: int, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__()
        for name in metrics or {}:
            if not is_name(name) or csv_cell(name) != name or name in TAKEN or "." in name:
                raise UsageError(f"model.metrics: nothing can be called {name!r} beside the figures of metrics.json: rename it")
        self.loss = MeanLoss()
        self.confusion = MulticlassConfusionMatrix(num_classes, ignore_index=-1, validate_args=False)
        self.top5 = TopHits() if num_classes > TOP else None
        self.metrics = MetricCollection({name: metric.clone() for name, metric in (metrics or {}).items()}, compute_groups=False)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Counts logits (B, classes) against int64 labels (B,); labels of -1 are padding and do not count."""
        counted, logits = labels >= 0, logits.float()  # probabilities of bfloat16 would be ties
        self.loss.update(F.cross_entropy(logits, labels.clamp_min(0), reduction="none"), counted)
        self.confusion.update(logits, labels)
        if self.top5 is not None:
            self.top5.update(logits, labels)
        if not len(self.metrics):
            return
        if len(labels) and bool(counted.all()):  # padding comes in whole batches
            self.metrics.update(logits, labels)
            return
        for metric in self.metrics.values():
            if any(isinstance(state, list) for state in metric._defaults.values()):
                # torchmetrics gathers lists, and needs one of the same rank and dtype from each device
                metric.update(logits[:0], labels[:0])

    def compute(self) -> Score:
        """The score over all devices."""
        matrix = self.confusion.compute().long().cpu()
        hits, counts = matrix.diag(), matrix.sum(1)
        return Score(
            accuracy=float(hits.sum().double() / counts.sum()),
            loss=round(float(self.loss.compute()), 6),
            images=int(counts.sum()),
            per_class=(hits.double() / counts).tolist(),
            confusion=matrix.tolist(),
            metrics={name: float(value) for name, value in self.metrics.compute().items()} if len(self.metrics) else {},
            top5=None if self.top5 is None else float(self.top5.compute().cpu().double() / counts.sum()),
        )

    @property
    def names(self) -> list[str]:
        """Of the figures that a score of it has."""
        ours = ["accuracy", "loss", "balanced_accuracy", "macro_f1", *(["top5"] if self.top5 is not None else [])]
        return list(dict.fromkeys([*ours, *self.metrics]))

    def reset(self) -> None:
        """Forgets all images."""
        for metric in (self.loss, self.confusion, self.top5, self.metrics):
            if metric is not None:
                metric.reset()


class RunningMetrics:
    """Loss and accuracy of the training steps since the last logged row, summed on the device without waiting for it.

    loss, hits: float32 scalars. images: their number, counted by the host. non_finite: 1 once a loss was NaN or infinite;
    finite_steps: how many batches came before that one. epoch: loss, hits and images of all devices in the rows of this epoch.
    batches: how many there were since that row, the same on every device, also where one had no image of a batch.
    """

    def __init__(self, device: torch.device, loss: float = 0.0, hits: float = 0.0, images: float = 0) -> None:
        self.loss, self.hits, self.non_finite, self.finite_steps = (
            torch.tensor(value, device=device) for value in (loss, hits, 0.0, 0.0)
        )
        self.images, self.batches = int(images), 0
        self.epoch = [0.0, 0.0, 0.0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a step changes."""
        return self.loss, self.hits, self.non_finite, self.finite_steps

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Adds the mean loss, detached, and the hits of a batch: logits (B, classes) for int64 labels (B,)."""
        self.loss.add_(loss, alpha=len(labels))
        self.hits.add_(logits.argmax(1).eq_(labels).sum())

    def watch(self, loss: Tensor) -> None:
        """Remembers, on the device, whether this or an earlier loss was not finite."""
        self.non_finite.copy_(torch.maximum(self.non_finite, 1.0 - loss.isfinite().float()))
        self.finite_steps.add_(1.0 - self.non_finite)

    def sums(self) -> Tensor:
        """Loss, hits and images of this device, and whether a loss was not finite, as float32 (4,)."""
        return torch.stack((self.loss, self.hits, self.hits.new_tensor(self.images), self.non_finite))

    def start_row(self) -> None:
        """Forgets what was logged."""
        for tensor in (self.loss, self.hits, self.finite_steps):
            tensor.zero_()
        self.images = self.batches = 0

    def epoch_means(self) -> tuple[float, float]:
        """Mean training loss and accuracy over the epoch so far, all devices together."""
        loss, hits, images = self.epoch
        return (loss / images, hits / images) if images else (float("nan"), float("nan"))


class PredictionCollector(Metric):
    """The logits of every image that a pass over a set looked at, once each and in the order of the set.

    A batch is only noted, without waiting for the device; several processes put theirs together at the end.
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
        rows = indices.argsort()
        rows = rows[labels[rows] >= 0]  # chosen here, as choosing by value would have made each batch wait
        return {"indices": indices[rows], "labels": labels[rows], "probabilities": logits[rows].double().softmax(1)}

    def predictions(self) -> dict[str, Tensor]:
        """What `compute` returns, with one row also for a single image, of which torchmetrics makes scalars."""
        return {name: torch.atleast_1d(values) for name, values in self.compute().items()}
