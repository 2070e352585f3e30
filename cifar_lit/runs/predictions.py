"""The rows that say what a net makes of images: of a data set in `predictions.csv`, of files from `cifar-lit classify`.

Both have the same columns, in this order; what a row does not know is empty, or null in JSON:

    index, label                 place in the set or among the files; the class that is true, which is known of a data set only
    predicted, probability       the likeliest class and its probability
    class_2, probability_2, …    the next ones
    path, novelty, unlike, error of files only: the path as given, its distance from the training images, whether that is more
                                 than nearly all held-out images have (yes or no), and why the file could not be read
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from cifar_lit.files import atomic_write

TOP = 3  # classes that a row names, unless told otherwise


@dataclass(frozen=True)
class Row:
    """One image.

    index: its place. top: the likeliest classes with their probabilities, the best first; none where it could not be read.
    label: the true class. path, novelty, unlike, error: see above.
    """

    index: int
    top: Sequence[tuple[str, float]]
    label: str | None = None
    path: str | None = None
    novelty: float | None = None
    unlike: bool | None = None
    error: str | None = None


def columns(top: int, files: bool) -> tuple[str, ...]:
    """The names of the columns of rows with `top` classes, of a data set's images or of files."""
    further = [name for rank in range(2, top + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    return ("index", "label", "predicted", "probability", *further, *(("path", "novelty", "unlike", "error") if files else ()))


def values(row: Row, top: int, files: bool) -> tuple[Any, ...]:
    """What a row has in each of `columns`, None where it has nothing; probabilities and distances with six digits."""
    best: list[Any] = [item for name, probability in row.top[:top] for item in (name, round(probability, 6))]
    best += [None] * (2 * top - len(best))
    distance = None if row.novelty is None else round(row.novelty, 6)
    return (row.index, row.label, *best, *((row.path, distance, row.unlike, row.error) if files else ()))


class CsvRows:
    """Writes rows as CSV, the names of the columns first."""

    def __init__(self, file: TextIO, top: int, files: bool) -> None:
        self._writer, self._top, self._files = csv.writer(file, lineterminator="\n"), top, files
        self._writer.writerow(columns(top, files))

    def write(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        self._writer.writerows([_cell(value) for value in values(row, self._top, self._files)] for row in rows)


class JsonRows:
    """Writes each row as a JSON object on a line of its own."""

    def __init__(self, file: TextIO, top: int, files: bool) -> None:
        self._file, self._top, self._files = file, top, files

    def write(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        names = columns(self._top, self._files)
        for row in rows:
            named = dict(zip(names, values(row, self._top, self._files), strict=True))
            self._file.write(json.dumps(named) + "\n")  # ASCII: a path may hold what is no text


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6f}" if isinstance(value, float) else value


def write_predictions(path: Path, classes: Sequence[str], batches: Iterable[Mapping[str, Tensor]]) -> int:
    """Writes one row an image of a data set.

    batches: of `ImageClassifier.predict_step`: indices and labels int64 (B,), probabilities float32 (B, classes).
    Returns the number of rows.
    """
    count, top = 0, min(TOP, len(classes))
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = CsvRows(file, top, files=False)
        for batch in batches:
            best, places = batch["probabilities"].topk(top, dim=1)
            found = zip(batch["indices"].tolist(), batch["labels"].tolist(), best.tolist(), places.tolist(), strict=True)
            writer.write(
                Row(index, [(classes[place], value) for place, value in zip(chosen, probabilities, strict=True)], classes[label])
                for index, label, probabilities, chosen in found
            )
            count += len(places)
    return count


# ---- What a net made of each test image, and what follows from that: the confusion matrix, the worst mistakes.


@dataclass(frozen=True)
class PredictionTable:
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


def table_of(found: Mapping[str, Tensor]) -> PredictionTable:
    """The outcomes in what a test gathers: `indices`, `labels` (N,) and `probabilities` (N, classes)."""
    probability, predicted = found["probabilities"].max(1)
    return PredictionTable(found["indices"], found["labels"], predicted, probability.double())


def read_outcomes(path: Path, classes: Sequence[str]) -> PredictionTable | None:
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
    return PredictionTable(
        torch.tensor(indices), torch.tensor(labels), torch.tensor(predicted), torch.tensor(probability).double()
    )


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """What tells one test set from another: the sha256, in hex, over its uint8 images (N, H, W, C) and its int64 labels (N,)."""
    digest = sha256()
    for part in images.split(1024):  # which may be mapped from a file
        digest.update(part.cpu().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()
