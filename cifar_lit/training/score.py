"""The result of an evaluation, and the metrics that every result has.

To add a metric, write a function of a `Score` and a line in `METRICS`. The metric then appears on the console and in
metrics.csv, TensorBoard, metrics.json, the report and `cifar-lit compare`, and may be `model.monitor`. This module does
not import torch, because `compare` starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

TOP = 5  # k of the top-k accuracy, which is scored if there are more than k classes


class Score(NamedTuple):
    """Result of one evaluation. Accuracies are fractions; the loss is a mean over images.

    Args:
        per_class: accuracy of each class, or average precision of each label; NaN for one without images.
        confusion: number of images by class (rows) and predicted class (columns); empty with several labels an image.
        further: values of `model.metrics`. With several labels, `label_scores.LABEL_SCORES` as well.
        top5: fraction of images whose class is among the TOP likeliest; None with TOP classes or fewer.
    """

    accuracy: float
    loss: float
    images: int
    per_class: list[float]
    confusion: list[list[int]]
    further: Mapping[str, float] = {}
    top5: float | None = None

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any] | None) -> Score | None:
        """Return the score saved in a checkpoint, None if it has none."""
        return cls(**{**saved, "confusion": saved["confusion"].tolist()}) if saved else None

    @property
    def values(self) -> dict[str, float]:
        """All numbers of the score by name. A metric of `model.metrics` replaces a built-in one of the same name."""
        values = {"accuracy": self.accuracy, "loss": self.loss}
        for name in built_in_names(len(self.confusion)):
            values[name] = METRICS[name].compute(self)
        return {**values, **self.further}

    def logged(self, stage: str) -> dict[str, float]:
        """Return the values under the names used by loggers and callbacks, such as `val/accuracy`."""
        return {f"{stage}/{name}": value for name, value in self.values.items()}


def balanced_accuracy(score: Score) -> float:
    """Return the mean accuracy of the classes that have images."""
    accuracies = [accuracy for accuracy in score.per_class if not math.isnan(accuracy)]
    if not accuracies:
        return math.nan
    return round(fmean(accuracies), 6)


def macro_f1(score: Score) -> float:
    """Return the mean F1 (harmonic mean of precision and recall) of the classes that have images."""
    counts = np.array(score.confusion)
    labelled, predicted = counts.sum(1), counts.sum(0)
    if not labelled.any():
        return math.nan
    f1 = 2 * counts.diagonal() / np.maximum(labelled + predicted, 1)
    return round(float(f1[labelled > 0].mean()), 6)


class BuiltIn(NamedTuple):
    """A metric of every score, besides accuracy and loss.

    Args:
        text: its name on the console and in the report.
        column: its column in the table of `cifar-lit compare`.
        compute: returns its value.
        min_classes: the least number of classes for which it exists.
    """

    text: str
    column: str
    compute: Callable[[Score], float]
    min_classes: int = 1


METRICS = {
    "balanced_accuracy": BuiltIn("balanced accuracy", "balanced", balanced_accuracy),
    "macro_f1": BuiltIn("macro F1", "F1", macro_f1),
    "top5": BuiltIn("top-5 accuracy", "top 5", attrgetter("top5"), min_classes=TOP + 1),
}
# Names in metrics.json that are not available to `model.metrics`.
RESERVED = (
    "accuracy", "loss", "images", "interval", "per_class", "tta", "calibration", "coverage", "groups", "fingerprint",
    "labels", "at_thresholds",
)  # fmt: skip


def built_in_names(num_classes: int) -> list[str]:
    """Return the names of the built-in metrics that exist for a number of classes."""
    return [name for name, metric in METRICS.items() if num_classes >= metric.min_classes]


def value_names(num_classes: int, further: Iterable[str]) -> list[str]:
    """Return the names of the values in a score. further: names of `model.metrics`."""
    return list(dict.fromkeys(["accuracy", "loss", *built_in_names(num_classes), *further]))
