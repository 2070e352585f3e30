"""Predictions for the images of a data set: `predictions.csv` and `probabilities.npy` of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.files import atomic_write, write_array
from cifar_lit.base.text import csv_text
from cifar_lit.data.image_set import ImageSet
from cifar_lit.run.record import FEW_CLASSES, GROUP
from cifar_lit.training.score import TOP

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

    Columns: index, label, predicted, probability, and probability_<class> of every class, with six digits. With more
    than `FEW_CLASSES` classes, the most probable ones follow instead: class_2, probability_2 and so on. The array has
    the same rows and all classes, float32 (N, classes).

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

    columns = [f"probability_{name}" for name in names]
    if len(names) > FEW_CLASSES:
        columns = [f"{column}_{rank}" for rank in range(2, TOP + 1) for column in ("class", "probability")]
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        if not "".join([*names, *images.names]).isascii():
            file.write("\ufeff")  # Excel takes a table without a byte order mark for one of Windows' old code pages
        file.write(csv_text([["index", "label", "predicted", "probability", *columns, *further]]))
        for rows in order.split(ROWS_AT_ONCE):
            table = []
            likeliest = probabilities[rows].topk(min(TOP, len(names)))
            first = probabilities[rows, :FEW_CLASSES]  # all, or unused
            part = (indices[rows], labels[rows], likeliest.indices, likeliest.values, first)
            for index, label, ranked, highest, values in zip(*map(Tensor.tolist, part), strict=True):
                cells = [f"{value:.6f}" for value in values]
                if len(names) > FEW_CLASSES:
                    cells = []
                    for number, value in zip(ranked[1:], highest[1:], strict=True):
                        cells += [names[number], f"{value:.6f}"]
                own = [values_of[index] for values_of in further.values()]
                table.append([index, names[label], names[ranked[0]], f"{highest[0]:.6f}", *cells, *own])
            file.write(csv_text(table))
    write_array(path.with_name("probabilities.npy"), probabilities[order].float().contiguous().numpy())
    return len(order)


def read_probabilities(run: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return a run's probabilities.npy, float32 (N, classes); None if there is no such file, or of another shape."""
    file = run / "probabilities.npy"
    if not file.is_file():
        return None
    values = np.load(file)
    if values.shape != shape:
        return None
    return torch.from_numpy(values)
