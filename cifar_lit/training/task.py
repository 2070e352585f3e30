"""What a label is: `OneLabel`, one class of each image, or `SeveralLabels`. A task owns loss, probabilities and hits.

The data choose it, see `task_of`, unless it is given: `ImageClassifier(task=SeveralLabels())`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError


class OneLabel:
    """Each image has one class: labels are int64 (B,). Cross-entropy and softmax."""

    monitor = "accuracy"  # the score that selects the best checkpoint by default
    size = "num_classes"  # torchmetrics' argument for the number of classes

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float, reduction: str) -> Tensor:
        """Return the cross-entropy of each image, (B,), or their mean. targets: labels, or shares (B, classes)."""
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, in the shape of the logits (B, classes)."""
        return logits.softmax(1)

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the most probable class of each image, in the form of labels."""
        return logits.argmax(1)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return whether the prediction of each image is right, bool (B,)."""
        return self.predicted(logits).eq_(labels)

    def counted(self, labels: Tensor) -> Tensor:
        """Return whether each image is counted, bool (B,); padding is not."""
        return labels >= 0


@dataclass(frozen=True)
class SeveralLabels:
    """An image has several labels or none: labels are float32 (B, classes), 1, 0, or -1 for unknown ones.

    Binary cross-entropy and a sigmoid for each label. Unknown labels count neither in the loss nor in a score.

    Args:
        precision: precision on validation images that the threshold of a label is to reach, with the largest recall.
            By default, a threshold is that with the largest F1.
    """

    precision: float | None = None

    monitor = "mean_average_precision"
    size = "num_labels"

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float, reduction: str) -> Tensor:
        """Return the loss of each image, (B,), or their mean: the mean of its known labels. Smoothing moves to 1/2."""
        known = targets >= 0
        smoothed = torch.lerp(targets.clamp_min(0), torch.full_like(targets, 0.5), label_smoothing)
        losses = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none") * known
        losses = losses.sum(1) / known.sum(1).clamp_min(1)
        return losses.mean() if reduction == "mean" else losses

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each label, in the shape of the logits (B, classes)."""
        return logits.sigmoid()

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the labels with a probability of at least 1/2 of each image, in the form of labels."""
        return (logits >= 0).float()

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return whether all known labels of each image are predicted right, bool (B,)."""
        return ((self.predicted(logits) == labels) | (labels < 0)).all(1)

    def counted(self, labels: Tensor) -> Tensor:
        """Return whether each image has a known label, bool (B,); padding has none."""
        return (labels >= 0).any(1)

    def thresholds(self, probabilities: Tensor, labels: Tensor) -> list[float]:
        """Return for each label the probability from which an image gets it.

        It is 1/2 for a label that no image has, and 1 if no threshold reaches the precision.

        probabilities, labels: (N, classes), of validation images.
        """
        found = []
        for column, targets in zip(probabilities.T, labels.T, strict=True):
            values, order = column[targets >= 0].sort(descending=True)
            has = targets[targets >= 0][order]
            if not has.any():
                found.append(0.5)
                continue
            hits, given = has.cumsum(0), torch.arange(1, len(has) + 1)
            scores = 2 * hits / (given + has.sum())
            if self.precision is not None:
                scores = hits * (hits / given >= self.precision)
            following = torch.cat((values[1:], values.new_zeros(1)))
            score, best = (scores * (values > following)).max(0)  # equal probabilities stay together
            middle = float(values[best] + following[best]) / 2
            found.append(middle if score > 0 else 1.0)
        return found


Task = OneLabel | SeveralLabels


def check_task(task: Task, labels: Tensor) -> None:
    """Raise UsageError if the labels of a batch are not those of the task."""
    several = isinstance(task, SeveralLabels)
    if (labels.ndim == 2, labels.is_floating_point()) != (several, several):
        needed = "float (B, classes) with ImageClassifier(task=SeveralLabels()), else int64 (B,)"
        raise UsageError(f"labels must be {needed}, not {labels.dtype} {tuple(labels.shape)}")


def task_of(labels: Tensor) -> Task:
    """Return the task of labels, int64 (N,) or float (N, classes)."""
    return OneLabel() if labels.ndim == 1 else SeveralLabels()
