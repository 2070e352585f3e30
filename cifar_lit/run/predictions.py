"""Predictions for the images of a data set: `predictions.csv` and `probabilities.npy` of a run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cifar_lit.base.files import atomic_write, write_array
from cifar_lit.base.text import csv_cell, csv_text
from cifar_lit.data.image_set import ImageSet
from cifar_lit.run.record import GROUP

ROWS_AT_ONCE = 4096  # rows converted to Python numbers in one step


class PredictionTable(NamedTuple):
    """Predictions for N images."""

    indices: Tensor  # rows of the data set, int64 (N,)
    labels: Tensor  # class numbers, int64 (N,)
    predicted: Tensor  # class numbers, int64 (N,)
    probability: Tensor  # probability of the predicted class, float64 (N,)

    @property
    def hits(self) -> Tensor:
        """Whether each prediction is correct, bool (N,)."""
        return self.labels == self.predicted

    def confusion(self, classes: int) -> Tensor:
        """Return images by label (rows) and predicted class (columns), int64 (classes, classes)."""
        return torch.bincount(self.labels * classes + self.predicted, minlength=classes**2).view(classes, classes)

    def confident_mistakes(self, limit: int) -> Tensor:
        """Return the table rows of at most `limit` wrong predictions, the most probable first."""
        rows = (~self.hits).nonzero()[:, 0]
        return rows[self.probability[rows].neg().argsort(stable=True)][:limit]


def prediction_table(predictions: Mapping[str, Tensor]) -> PredictionTable:
    """Return the table of predictions: `indices` and `labels`, int64 (N,), and `probabilities` (N, classes)."""
    probability, predicted = predictions["probabilities"].max(1)
    return PredictionTable(predictions["indices"], predictions["labels"], predicted, probability.double())


def write_predictions(path: Path, batches: Sequence[Mapping[str, Tensor]], images: ImageSet) -> int:
    """Write `predictions.csv` in the order of the data set, and `probabilities.npy` beside it.

    Columns: index, label, predicted, probability, and probability_<class> of every class, with six digits. The array
    has the same rows, float32 (N, classes).

    Args:
        batches: results of `ImageClassifier.predict_step`.
        images: the data set. Its groups are further columns (group_<name>), and its names the last one (path).

    Returns:
        The number of rows.
    """
    indices = torch.cat([batch["indices"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    probabilities = torch.cat([batch["probabilities"] for batch in batches])
    order = indices.argsort(stable=True)
    names = images.classes
    further = {f"{GROUP}{name}": values for name, values in images.columns.items()}
    if images.names:
        further["path"] = images.names

    header = ["index", "label", "predicted", "probability", *(f"probability_{name}" for name in names), *further]
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        file.write(csv_text([header]))
        for rows in order.split(ROWS_AT_ONCE):
            table = []
            part = (indices[rows], labels[rows], probabilities[rows].argmax(1), probabilities[rows])
            for index, label, predicted, values in zip(*map(Tensor.tolist, part), strict=True):
                cells = [f"{value:.6f}" for value in values]
                own = [values_of[index] for values_of in further.values()]
                table.append([index, names[label], names[predicted], cells[predicted], *cells, *own])
            file.write(csv_text(table))
    write_array(path.with_name("probabilities.npy"), probabilities[order].float().contiguous().numpy())
    return len(order)


def read_predictions(path: Path, classes: Sequence[str]) -> PredictionTable | None:
    """Return the table in a `predictions.csv`; None if there is no such file, or it has other classes."""
    number = {str(csv_cell(name)): index for index, name in enumerate(classes)}
    indices, labels, predicted, probability = [], [], [], []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                indices.append(int(row["index"]))
                labels.append(number[row["label"]])
                predicted.append(number[row["predicted"]])
                probability.append(float(row["probability"]))
    except (OSError, KeyError):
        return None
    classes_of = torch.tensor(labels), torch.tensor(predicted)
    return PredictionTable(torch.tensor(indices), *classes_of, torch.tensor(probability, dtype=torch.float64))
