"""Tables of predictions: `predictions.csv` and `probabilities.npy` of a run, and the rows of `cifar-lit classify`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from cifar_lit.base.files import atomic_write, write_array
from cifar_lit.base.text import csv_cell, csv_text
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.progress import progress
from cifar_lit.inference.model_file import READ_AT_ONCE, LoadedNet
from cifar_lit.run.folder import GROUP

ROWS_AT_ONCE = 4096  # rows converted to Python numbers in one step

# ---- Predictions for a data set.


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


def set_logits(net: LoadedNet, images: ImageSet, rows: Tensor, what: str) -> Tensor:
    """Return float32 logits (N, classes) of rows of a set, on the CPU; the images may be larger than the memory.

    what: description of the progress.
    """
    logits = []
    with progress(what, len(rows), min_seconds=5.0) as advance:
        for part in rows.split(READ_AT_ONCE):
            logits.append(net.logits(images.take(part).permute(0, 3, 1, 2)))
            advance(len(part))
    return torch.cat(logits)


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """Return the SHA-256, in hex, of images, uint8 (N, H, W, C), and labels, int64 (N,)."""
    digest = sha256()
    for part in (*images.split(1024), labels):  # in parts, because the images may be memory-mapped
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- Rows of `cifar-lit classify`, as CSV or JSON lines. Unknown values are empty in CSV and null in JSON.
#
#     index                        number of the file
#     label, probability           most probable class, named as in `serve` and `Prediction`
#     class_2, probability_2, …    next classes
#     path                         path as given
#     novelty                      out-of-distribution score
#     unknown                      whether the image is rejected (yes or no)
#     prediction_set               classes of the prediction set (--coverage), in CSV with | between them
#     error                        why the file could not be read

TOP = 3  # default number of classes in a row
Value = int | float | str | bool | Sequence[str] | None


@dataclass(frozen=True)
class Row:
    """Prediction for a file. top: the most probable classes with their probabilities; empty for an unreadable file."""

    index: int
    top: Sequence[tuple[str, float]]
    path: str | None = None
    novelty: float | None = None
    unknown: bool | None = None
    prediction_set: Sequence[str] | None = None
    error: str | None = None

    def values(self, top: int) -> dict[str, Value]:
        """Return the values by column, with `top` classes and six digits."""
        values: dict[str, Value] = {"index": self.index}
        best = [*self.top[:top], *[(None, None)] * (top - len(self.top))]
        for rank, (name, probability) in enumerate(best, 1):
            values["label" if rank == 1 else f"class_{rank}"] = name
            values["probability" if rank == 1 else f"probability_{rank}"] = _rounded(probability)
        values |= {"path": self.path, "novelty": _rounded(self.novelty), "unknown": self.unknown}
        return values | {"prediction_set": self.prediction_set, "error": self.error}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


class CsvRows:
    """Writer of CSV with a header."""

    def __init__(self, file: TextIO, top: int) -> None:
        self._file, self._top = file, top
        file.write(csv_text([Row(0, ()).values(top)]))

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows."""
        self._file.write(csv_text(map(_cell, row.values(self._top).values()) for row in rows))


def _cell(value: Value) -> object:
    if value is True:
        return "yes"
    if value is False:
        return "no"
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, tuple):
        return "|".join(value)
    return value


class JsonRows:
    """Writer of JSON lines."""

    def __init__(self, file: TextIO, top: int) -> None:
        self._file, self._top = file, top

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows."""
        for row in rows:
            self._file.write(json.dumps(row.values(self._top)) + "\n")  # ASCII, as a path may contain invalid Unicode
