"""What a net made of each test image, and what follows from that: the confusion matrix, the worst mistakes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """The answers to N images.

    indices: rows of their set; labels, predicted: classes by number; all int64 (N,). probability: of the predicted class,
    float64 (N,).
    """

    indices: Tensor
    labels: Tensor
    predicted: Tensor
    probability: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def hits(self) -> Tensor:
        """bool (N,): whether the predicted class is the label."""
        return self.labels == self.predicted

    def confusion(self, classes: int) -> Tensor:
        """int64 (classes, classes): images by label (rows) and predicted class (columns)."""
        return torch.bincount(self.labels * classes + self.predicted, minlength=classes**2).view(classes, classes)

    def confident_mistakes(self, most: int) -> Tensor:
        """Places of up to `most` wrong answers, the most probable first."""
        return _ranked((~self.hits).nonzero()[:, 0], -self.probability)[:most]

    def doubtful_hits(self, most: int) -> Tensor:
        """Places of up to `most` right answers, the least probable first."""
        return _ranked(self.hits.nonzero()[:, 0], self.probability)[:most]


def _ranked(places: Tensor, by: Tensor) -> Tensor:
    return places[by[places].argsort(stable=True)]


def outcomes_of(found: Mapping[str, Tensor]) -> Outcomes:
    """The outcomes in what a test gathers: `indices`, `labels` (N,) and `probabilities` (N, classes)."""
    probability, predicted = found["probabilities"].max(1)
    return Outcomes(found["indices"], found["labels"], predicted, probability.double())


def read_outcomes(path: Path, classes: Sequence[str]) -> Outcomes | None:
    """The outcomes in a `predictions.csv`; None when there is none, or it is of other classes or not whole."""
    number = {name: place for place, name in enumerate(classes)}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                (int(row["index"]), number[row["label"]], number[row["predicted"]], float(row["probability"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not rows:
        return None
    indices, labels, predicted, probability = zip(*rows, strict=True)
    return Outcomes(torch.tensor(indices), torch.tensor(labels), torch.tensor(predicted), torch.tensor(probability).double())


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """What tells one test set from another: the sha256, in hex, over its uint8 images (N, H, W, C) and its int64 labels (N,)."""
    digest = sha256()
    for part in images.split(1024):  # which may be mapped from a file
        digest.update(part.cpu().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()
