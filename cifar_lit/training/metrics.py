"""Metrics that are exact on any number of devices and cheap enough for every training step.

`Evaluation` accumulates one pass over a set and computes a `Score`; see `training.score`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.utilities import dim_zero_cat

from cifar_lit.base.errors import UsageError
from cifar_lit.base.plugins import build_part
from cifar_lit.training.label_scores import LABEL_SCORES, label_scores
from cifar_lit.training.score import RESERVED, TOP, Score, value_names
from cifar_lit.training.task import OneLabel, SeveralLabels, Task, check_task


class MeanLoss(Metric):
    """Mean loss over images, bit-identical for any order of images and any number of devices.

    Each loss is rounded to a multiple of 2⁻²⁰ and summed as an integer; torchmetrics' MeanMetric sums floats. The
    rounding changes a mean by less than 5e-7. The result is NaN if a loss is not finite or above 2²⁰.
    """

    full_state_update = False
    UNIT, MAX_LOSS = 2.0**-20, 2.0**20

    sums: Tensor  # int64 (3,): units of loss, number of images, number of unusable losses

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, counted: Tensor) -> None:
        """Add the losses, float32 (B,), where `counted`, bool (B,), is true."""
        usable = (losses <= self.MAX_LOSS) & counted  # false for NaN
        units = torch.where(usable, losses / self.UNIT, 0.0).round().long()
        self.sums += torch.stack((units, counted.long(), (counted & ~usable).long())).sum(1)

    def compute(self) -> Tensor:
        """Return the mean, a float32 scalar; NaN if a loss was unusable or no image was counted."""
        total, count, unusable = self.sums
        return torch.where(unusable > 0, torch.nan, total.float() * self.UNIT / count)


class Evaluation(nn.Module):
    """Loss and further metrics of one pass over a set. A subclass for each task adds its own scores."""

    task: Task

    def __init__(self, num_classes: int, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__()
        self.loss = MeanLoss()
        further = {}
        for name, metric in (metrics or {}).items():
            if name in RESERVED:
                raise UsageError(f"model.metrics: {name!r} is reserved in metrics.json: rename it")
            further[name] = build_part(metric, Metric, **{self.task.size: num_classes}).clone()
        self.further = MetricCollection(further, compute_groups=False)
        self.names = value_names(num_classes, further)  # names of the values in a score

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits (B, classes) and labels as in `data.image_set.Batch`; -1 is padding."""
        check_task(self.task, labels)
        counted = self.task.counted(labels)
        logits = logits.float()  # probabilities in bfloat16 would tie
        self.count(logits, labels, counted)
        if not len(self.further):
            return
        if bool(counted.any()):
            self.further.update(logits[counted], labels[counted].long())
            return
        for metric in self.further.values():
            # To gather a list, torchmetrics needs an entry with the same dtype and number of dimensions on each device.
            if any(isinstance(state, list) for state in metric._defaults.values()):
                metric.update(logits[:0], labels[:0].long())

    def count(self, logits: Tensor, labels: Tensor, counted: Tensor) -> None:
        """Add losses, and the scores of the task. counted: bool (B,), false for padding."""
        raise NotImplementedError

    def compute(self) -> Score:
        """Return the score over all devices. Collective: every rank must call this."""
        raise NotImplementedError

    def further_values(self) -> dict[str, float]:
        """Return the values of the further metrics. Collective: every rank must call this."""
        return {name: float(value) for name, value in self.further.compute().items()}

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.children():
            metric.reset()  # type: ignore[operator]


class ClassEvaluation(Evaluation):
    """Confusion matrix (in integers) and top-5 hits of images with one label each."""

    task: Task = OneLabel()

    def __init__(self, num_classes: int, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__(num_classes, metrics)
        self.confusion = MulticlassConfusionMatrix(num_classes, ignore_index=-1, validate_args=False)
        self.top5: Metric | None = None
        if num_classes > TOP:
            self.top5 = MulticlassAccuracy(
                num_classes, top_k=TOP, average="micro", ignore_index=-1, validate_args=False
            )

    def count(self, logits: Tensor, labels: Tensor, counted: Tensor) -> None:
        """Add logits (B, classes) and labels (B,)."""
        self.loss.update(F.cross_entropy(logits, labels.clamp_min(0), reduction="none"), counted)
        self.confusion.update(logits, labels)
        if self.top5 is not None:
            self.top5.update(logits, labels)

    def compute(self) -> Score:
        """Return the score over all devices. Collective: every rank must call this."""
        matrix = self.confusion.compute().long().cpu()
        hits = matrix.diag()
        counts = matrix.sum(1)
        return Score(
            accuracy=float(hits.sum().double() / counts.sum()),
            loss=round(float(self.loss.compute()), 6),
            images=int(counts.sum()),
            per_class=(hits.double() / counts).tolist(),
            confusion=matrix.tolist(),
            further=self.further_values(),
            top5=None if self.top5 is None else round(float(self.top5.compute()), 6),
        )


class PredictionCollector(Metric):
    """Predictions of every image in one pass over a set, in the order of the set.

    Updates do not synchronise the device. All processes exchange their logits at the end.
    """

    full_state_update = False

    indices: list[Tensor]
    labels: list[Tensor]
    logits: list[Tensor]

    def __init__(self, task: Task = OneLabel()) -> None:  # noqa: B008 (it has no state)
        super().__init__()
        self.task = task
        for name in ("indices", "labels", "logits"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Add logits (B, classes), labels as in `data.image_set.Batch`, and rows of the set, int64 (B,)."""
        self.indices.append(indices)
        self.labels.append(labels)
        self.logits.append(logits.detach().float())  # some backends cannot send bfloat16

    def compute(self) -> dict[str, Tensor]:
        """Return `indices`, int64 (N,), `labels`, `probabilities` (N, classes), and `novelty` (N,), the energy.

        All are on the CPU. Images of all devices are sorted by index. Floats are float64, in which different logits
        have different probabilities.
        """
        indices, labels, logits = (dim_zero_cat(state).cpu() for state in (self.indices, self.labels, self.logits))
        rows = indices.argsort()
        rows = rows[self.task.counted(labels[rows])]  # not in `update`, where it would synchronise the device
        logits = logits[rows].double()
        values = {"probabilities": self.task.probabilities(logits), "novelty": -logits.logsumexp(1)}
        return {"indices": indices[rows], "labels": labels[rows], **values}

    def predictions(self) -> dict[str, Tensor]:
        """Return the result of `compute`, with at least one dimension: torchmetrics squeezes single rows."""
        return {name: torch.atleast_1d(values) for name, values in self.compute().items()}


class LabelEvaluation(Evaluation):
    """Scores of images with several labels, at a probability of 1/2."""

    task: Task = SeveralLabels()

    def __init__(self, num_classes: int, metrics: Mapping[str, Metric] | None = None) -> None:
        super().__init__(num_classes, metrics)
        self.names = value_names(0, [*LABEL_SCORES, *self.further])
        self.predictions = PredictionCollector(self.task)

    def count(self, logits: Tensor, labels: Tensor, counted: Tensor) -> None:
        """Add logits and labels (B, classes)."""
        self.loss.update(self.task.loss(logits, labels, 0.0, "none"), counted)
        self.predictions.update(logits, labels, torch.arange(len(labels), device=labels.device))  # in any order

    def compute(self) -> Score:
        """Return the score over all devices. Collective: every rank must call this."""
        found = self.predictions.predictions()
        images = len(found["labels"])
        scores = label_scores(found["probabilities"], found["labels"], 0.5, np.ones((1, images), int))
        totals = {name: round(float(value[0]), 6) for name, value in scores.totals.items()}
        return Score(
            accuracy=totals.pop("accuracy"),
            loss=round(float(self.loss.compute()), 6),
            images=images,
            per_class=scores.average_precision[0].tolist(),
            confusion=[],
            further=totals | self.further_values(),
        )


EVALUATIONS: dict[type, type[Evaluation]] = {OneLabel: ClassEvaluation, SeveralLabels: LabelEvaluation}  # by the task


# ---- test-time augmentation

VIEWS = ("none", "mirror", "full")


def view_logits(net: nn.Module, images: Tensor, views: str, plain: Tensor) -> Tensor:
    """Return logits averaged over views of each image, as in K. Jordan's airbench (2024).

    Args:
        net: the net, in evaluation mode.
        images: float (B, C, height, width).
        views: `mirror`: plain and mirrored images, each with weight 1/2. `full`: plain and mirrored images, each with
            weight 1/4, and the same shifted by (1, 1) and (-1, -1) pixels with reflected edges, each with weight 1/8.
        plain: logits of the plain images (B, classes).

    Returns:
        (B, classes), at least float32.
    """

    def with_mirror(images: Tensor, logits: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return (logits.type(dtype) + net(images.flip(3)).type(dtype)) / 2

    mean = with_mirror(images, plain)
    if views == "mirror":
        return mean
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    first, second = padded[:, :, :height, :width], padded[:, :, 2:, 2:]
    return mean / 2 + (with_mirror(first, net(first)) + with_mirror(second, net(second))) / 4
