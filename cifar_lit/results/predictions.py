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
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from cifar_lit.disk import written_whole

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
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
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
