"""What a net makes of images: of a data set in `predictions.csv` and `probabilities.npy`, of files from `cifar-lit classify`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor

from cifar_lit.files import atomic_write
from cifar_lit.runs.run_folder import read_rows
from cifar_lit.text import csv_cell

ROWS_AT_ONCE = 4096  # of the set, as Python numbers

# ---- Of a data set: `index,label,predicted,probability`, and the probability of every class in the order of the labels; of own
#      images also their path.


class PredictionTable(NamedTuple):
    """The predictions for N images.

    indices: rows of their set; labels, predicted: classes by number; all int64 (N,). probability: of the predicted class,
    float64 (N,).
    """

    indices: Tensor
    labels: Tensor
    predicted: Tensor
    probability: Tensor

    @property
    def hits(self) -> Tensor:
        """bool (N,): whether the predicted class is the label."""
        return self.labels == self.predicted

    def confusion(self, classes: int) -> Tensor:
        """int64 (classes, classes): images by label (rows) and predicted class (columns)."""
        return torch.bincount(self.labels * classes + self.predicted, minlength=classes**2).view(classes, classes)

    def confident_mistakes(self, most: int) -> Tensor:
        """Places of up to `most` wrong predictions, the most probable first."""
        places = (~self.hits).nonzero()[:, 0]
        return places[self.probability[places].neg().argsort(stable=True)][:most]

    def doubtful_hits(self, most: int) -> Tensor:
        """Places of up to `most` right predictions, the least probable first."""
        places = self.hits.nonzero()[:, 0]
        return places[self.probability[places].argsort(stable=True)][:most]


def prediction_table(predictions: Mapping[str, Tensor]) -> PredictionTable:
    """The table of what a test gathers: `indices`, `labels` int64 (N,) and `probabilities` (N, classes)."""
    probability, predicted = predictions["probabilities"].max(1)
    return PredictionTable(predictions["indices"], predictions["labels"], predicted, probability.double())


def write_predictions(
    path: Path, classes: Sequence[str], batches: Sequence[Mapping[str, Tensor]], files: Sequence[str] | None = None
) -> int:
    """Writes a row an image of a data set, in the order of the set, and beside it all probabilities as `probabilities.npy`.

    The array is float32 (N, classes), of the same rows; the table has six digits of them. Returns the number of rows.

    batches: of `ImageClassifier.predict_step`: indices and labels int64 (B,), probabilities (B, classes). files: the path of
    each image of the set, for a last column.
    """
    columns = ("indices", "labels", "probabilities")
    indices, labels, probabilities = (torch.cat([batch[name] for batch in batches]) for name in columns)
    order, names = indices.argsort(stable=True), [csv_cell(name) for name in classes]
    digits = ",".join(["%.6f"] * len(classes))
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        path_column = ["path"] if files else []
        writer.writerow(
            ["index", "label", "predicted", "probability", *(f"probability_{name}" for name in names), *path_column]
        )
        for rows in order.split(ROWS_AT_ONCE):
            part = (indices[rows], labels[rows], probabilities[rows].argmax(1), probabilities[rows])
            for index, label, predicted, values in zip(*(column.tolist() for column in part), strict=True):
                cells = (digits % tuple(values)).split(",")
                place = [csv_cell(files[index])] if files else []
                writer.writerow([index, names[label], names[predicted], cells[predicted], *cells, *place])
    array = probabilities[order].float().contiguous().numpy()
    with atomic_write(path.with_name("probabilities.npy")) as partial, partial.open("wb") as file:
        # np.save would write through `tofile`, whose error on a full disk has no errno.
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)
    return len(order)


def read_predictions(path: Path, classes: Sequence[str], count: int) -> PredictionTable | None:
    """Return the table in a `predictions.csv`, or None if it cannot be one of these classes and images.

    Each index must occur once and be below `count`, the number of images in the set. Probabilities must lie in 0 … 1; a
    diverged net has NaN for all images. Columns after the fourth are ignored.
    """
    number: dict[object, int] = {csv_cell(name): place for place, name in enumerate(classes)}
    try:
        rows = [
            (int(row["index"]), number[row["label"]], number[row["predicted"]], float(row["probability"]))
            for row in read_rows(path, ("index", "label", "predicted", "probability"))
        ]
    except (ValueError, KeyError):
        return None
    if not rows:
        return None
    *integers, values = zip(*rows, strict=True)
    is_index = all(0 <= index < count for index in integers[0]) and len(set(integers[0])) == len(rows)
    is_probability = all(0 <= value <= 1 for value in values) or all(map(math.isnan, values))
    if not (is_index and is_probability):
        return None
    indices, labels, predicted = map(torch.tensor, integers)
    return PredictionTable(indices, labels, predicted, torch.tensor(values, dtype=torch.float64))


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """What tells one test set from another: the sha256, in hex, over its uint8 images (N, H, W, C) and its int64 labels (N,)."""
    digest = sha256()
    for part in (*images.split(1024), labels):  # the images may be mapped from a file
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- Of files, from `cifar-lit classify`, as CSV or as JSON lines; what a row does not know is empty, or null in JSON.
#
#     index                           place among the files
#     label, probability              the likeliest class and its probability, named as in `serve` and `Prediction`
#     class_2, probability_2, …       the next ones
#     path, novelty, unlike, error    the path as given, how unlike the training images it is, whether that exceeds
#                                     95 % of the validation images (yes or no), and why the file could not be read

TOP = 3  # classes that a row names, unless told otherwise


@dataclass(frozen=True)
class Row:
    """One file: its columns above. top: the likeliest classes with their probabilities; none where it could not be read."""

    index: int
    top: Sequence[tuple[str, float]]
    path: str | None = None
    novelty: float | None = None
    unlike: bool | None = None
    error: str | None = None

    def values(self, top: int) -> dict[str, Any]:
        """The row by column, None where it has nothing; probabilities and novelty with six digits."""
        values: dict[str, Any] = {"index": self.index}
        for rank, (name, probability) in enumerate([*self.top, *[(None, None)] * top][:top], 1):
            values["label" if rank == 1 else f"class_{rank}"] = name
            values["probability" if rank == 1 else f"probability_{rank}"] = probability
        values |= {"path": self.path, "novelty": self.novelty, "unlike": self.unlike, "error": self.error}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


class CsvRows:
    """Writes rows as CSV, the names of the columns first."""

    def __init__(self, file: TextIO, top: int) -> None:
        self._writer, self._top = csv.writer(file, lineterminator="\n"), top
        self._writer.writerow(Row(0, ()).values(top))

    def write(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        for row in rows:
            values = {**row.values(self._top), "unlike": {True: "yes", False: "no", None: None}[row.unlike]}
            self._writer.writerow(
                f"{value:.6f}" if isinstance(value, float) else csv_cell(value) for value in values.values()
            )


class JsonRows:
    """Writes each row as a JSON object on a line of its own."""

    def __init__(self, file: TextIO, top: int) -> None:
        self._file, self._top = file, top

    def write(self, rows: Iterable[Row]) -> None:
        """Adds rows."""
        self._file.writelines(
            json.dumps(row.values(self._top)) + "\n" for row in rows
        )  # ASCII: a path may hold what is no text
