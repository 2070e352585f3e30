"""What a net makes of images: of a data set in `predictions.csv` and `probabilities.npy`, of files from `cifar-lit classify`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from cifar_lit.files import atomic_write

ROWS_AT_ONCE = 4096  # of the set, as Python numbers

# ---- Of a data set: `index,label,predicted,probability`, and the probability of every class in the order of the labels.
#
# In files of before, the columns behind `probability` are those of the next likeliest classes. What reads them here needs the
# first four only.


@dataclass(frozen=True)
class PredictionTable:
    """The predictions for N images.

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
        """Places of up to `most` wrong predictions, the most probable first."""
        return _ranked((~self.hits).nonzero()[:, 0], -self.probability)[:most]

    def doubtful_hits(self, most: int) -> Tensor:
        """Places of up to `most` right predictions, the least probable first."""
        return _ranked(self.hits.nonzero()[:, 0], self.probability)[:most]


def _ranked(places: Tensor, by: Tensor) -> Tensor:
    return places[by[places].argsort(stable=True)]


def prediction_table(predictions: Mapping[str, Tensor]) -> PredictionTable:
    """The table of what a test gathers: `indices`, `labels` int64 (N,) and `probabilities` (N, classes)."""
    probability, predicted = predictions["probabilities"].max(1)
    return PredictionTable(predictions["indices"], predictions["labels"], predicted, probability.double())


def write_predictions(path: Path, classes: Sequence[str], batches: Iterable[Mapping[str, Tensor]]) -> int:
    """Writes a row an image of a data set, in the order of the set, and beside it all probabilities as `probabilities.npy`.

    The array is float32 (N, classes), of the same rows; the table has six digits of them.

    Args:
        batches: Of `ImageClassifier.predict_step`: indices and labels int64 (B,), probabilities (B, classes).

    Returns:
        The number of rows.
    """
    parts = list(batches)
    gathered = {name: torch.cat([batch[name] for batch in parts]) for name in ("indices", "labels", "probabilities")}
    order = gathered["indices"].argsort(stable=True)
    names = [_csv_line([name]) for name in classes]
    cells = ",%.6f" * len(classes)
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        header = ["index", "label", "predicted", "probability", *(f"probability_{name}" for name in classes)]
        file.write(_csv_line(header) + "\n")
        for rows in order.split(ROWS_AT_ONCE):
            probabilities = gathered["probabilities"][rows]
            best, predicted = probabilities.max(1)
            columns = (gathered["indices"][rows], gathered["labels"][rows], predicted, best, probabilities)
            for index, label, likeliest, probability, all_of_them in zip(*(column.tolist() for column in columns), strict=True):
                row = f"{index},{names[label]},{names[likeliest]},{probability:.6f}"
                file.write(f"{row}{cells % tuple(all_of_them)}\n")
    with atomic_write(path.with_name("probabilities.npy")) as partial, partial.open("wb") as array:
        np.save(array, gathered["probabilities"][order].float().numpy())
    return len(order)


def _csv_line(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()


def read_predictions(path: Path, classes: Sequence[str]) -> PredictionTable | None:
    """The table in a `predictions.csv`; None when there is none, or it is of other classes or not whole."""
    number = {name: place for place, name in enumerate(classes)}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                (int(row["index"]), number[row["label"]], number[row["predicted"]], float(row["probability"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return None
    if not rows:
        return None
    indices, labels, predicted, probability = zip(*rows, strict=True)
    return PredictionTable(
        torch.tensor(indices), torch.tensor(labels), torch.tensor(predicted), torch.tensor(probability, dtype=torch.float64)
    )


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """What tells one test set from another: the sha256, in hex, over its uint8 images (N, H, W, C) and its int64 labels (N,)."""
    digest = sha256()
    for part in images.split(1024):  # which may be mapped from a file
        digest.update(part.cpu().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- Of files, from `cifar-lit classify`, as CSV or as JSON lines; what a row does not know is empty, or null in JSON.
#
#     index, label                    place among the files; the true class, which is not known of files
#     predicted, probability          the likeliest class and its probability
#     class_2, probability_2, …       the next ones
#     path, novelty, unlike, error    the path as given, the distance from the training images, whether that is more than nearly
#                                     all held-out images have (yes or no), and why the file could not be read

TOP = 3  # classes that a row names, unless told otherwise


@dataclass(frozen=True)
class Row:
    """One file.

    index: its place. top: the likeliest classes with their probabilities, the best first; none where it could not be read.
    path, novelty, unlike, error: see above.
    """

    index: int
    top: Sequence[tuple[str, float]]
    path: str | None = None
    novelty: float | None = None
    unlike: bool | None = None
    error: str | None = None

    def values(self, top: int) -> dict[str, Any]:
        """The row by column, None where it has nothing; probabilities and distances with six digits."""
        values: dict[str, Any] = {"index": self.index, "label": None}
        for rank in range(1, top + 1):
            columns = ("predicted", "probability") if rank == 1 else (f"class_{rank}", f"probability_{rank}")
            name, probability = self.top[rank - 1] if rank <= len(self.top) else (None, None)
            values |= dict(zip(columns, (name, None if probability is None else round(probability, 6)), strict=True))
        novelty = None if self.novelty is None else round(self.novelty, 6)
        return {**values, "path": self.path, "novelty": novelty, "unlike": self.unlike, "error": self.error}


class CsvRows:
    """Writes rows as CSV, the names of the columns first."""

    def __init__(self, file: TextIO, top: int) -> None:
        self._writer, self._top = csv.writer(file, lineterminator="\n"), top
        self._writer.writerow(Row(0, ()).values(top))

    def write(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        self._writer.writerows(map(_cell, row.values(self._top).values()) for row in rows)


class JsonRows:
    """Writes each row as a JSON object on a line of its own."""

    def __init__(self, file: TextIO, top: int) -> None:
        self._file, self._top = file, top

    def write(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        for row in rows:
            self._file.write(json.dumps(row.values(self._top)) + "\n")  # ASCII: a path may hold what is no text


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6f}" if isinstance(value, float) else value
