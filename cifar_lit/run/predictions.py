"""Predictions for the images of a data set: `predictions.csv` and `probabilities.npy` of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.files import write_array, write_text
from cifar_lit.base.text import csv_text
from cifar_lit.data.image_set import ImageSet, label_text
from cifar_lit.run.record import FEW_CLASSES, GROUP
from cifar_lit.training.score import TOP


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


def write_predictions(
    path: Path,
    batches: Sequence[Mapping[str, Tensor]],
    images: ImageSet,
    thresholds: Sequence[float] | Tensor | None = None,
) -> int:
    """Write `predictions.csv` in the order of the data set, and `probabilities.npy` beside it.

    Columns: index, label, predicted, probability, and probability_<class> of every class, with six digits. With more
    than `FEW_CLASSES` classes, the most probable ones follow instead: class_2, probability_2 and so on. The array has
    the same rows and all classes, float32 (N, classes).

    Args:
        batches: results of `ImageClassifier.predict_step`.
        images: the data set. Its groups are further columns (group_<name>), and its names the last one (path).
        thresholds: with several labels, those of the labels, (classes,), or for each image (N, classes). Label and
            predicted are then names with `|` between them, and all probabilities are columns.

    Returns:
        The number of rows.
    """
    indices = torch.cat([batch["indices"] for batch in batches])
    order = indices.argsort(stable=True)
    labels = torch.cat([batch["labels"] for batch in batches])[order]
    probabilities = torch.cat([batch["probabilities"] for batch in batches])[order]
    names = images.classes
    further = {f"{GROUP}{name}": values for name, values in images.columns.items()}
    if images.names:
        further["path"] = images.names
    columns = [f"probability_{name}" for name in names]
    is_ranked = len(names) > FEW_CLASSES and not images.has_several_labels
    if is_ranked:
        columns = [f"{column}_{rank}" for rank in range(2, TOP + 1) for column in ("class", "probability")]
    rows = [["index", "label", "predicted", "probability", *columns, *further]]
    likeliest = probabilities.topk(min(TOP, len(names)))
    predicted = likeliest.indices[:, 0]
    if images.has_several_labels:
        predicted = probabilities >= torch.as_tensor(thresholds)
    first = probabilities[:, : 0 if is_ranked else None]
    parts = (indices[order], likeliest.indices, likeliest.values, first)
    for place, (index, ranked, highest, values) in enumerate(zip(*map(Tensor.tolist, parts), strict=True)):
        cells = [f"{value:.6f}" for value in values]
        if is_ranked:
            cells = _next_classes([names[number] for number in ranked], highest)
        own = [values_of[index] for values_of in further.values()]
        texts = label_text(labels[place], names), label_text(predicted[place], names)
        rows.append([index, *texts, f"{highest[0]:.6f}", *cells, *own])
    mark = ""
    if not "".join([*names, *images.names]).isascii():
        mark = "\ufeff"  # Excel takes a table without a byte order mark for one of Windows' old code pages
    write_text(path, mark + csv_text(rows))
    write_array(path.with_name("probabilities.npy"), probabilities.float().contiguous().numpy())
    return len(order)


def _next_classes(names: Sequence[str], probabilities: Sequence[float]) -> list[str]:
    """Return the cells of an image's likeliest classes, without the first."""
    cells = []
    for name, probability in list(zip(names, probabilities, strict=True))[1:]:
        cells += [name, f"{probability:.6f}"]
    return cells


def read_probabilities(run: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return a run's probabilities.npy, float32 (N, classes); None if there is no such file, or of another shape."""
    file = run / "probabilities.npy"
    if not file.is_file():
        return None
    values = np.load(file)
    if values.shape != shape:
        return None
    return torch.from_numpy(values)
