"""`predictions.csv`: what a net makes of each image of a set."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from cifar_lit.results.run_folder import written_whole


def write_predictions(path: Path, classes: Sequence[str], batches: Iterable[Mapping[str, Tensor]]) -> int:
    """Writes one row an image: its index in the set, its label, the predicted class and that class's probability.

    batches: of `ImageClassifier.predict_step`: indices and labels int64 (B,), probabilities float32 (B, classes).
    Returns the number of rows.
    """
    count = 0
    with written_whole(path) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("index", "label", "predicted", "probability"))
        for batch in batches:
            probabilities, predicted = batch["probabilities"].max(1)
            for index, label, choice, probability in zip(
                batch["indices"].tolist(), batch["labels"].tolist(), predicted.tolist(), probabilities.tolist(), strict=True
            ):
                writer.writerow((index, classes[label], classes[choice], f"{probability:.6f}"))
                count += 1
    return count
