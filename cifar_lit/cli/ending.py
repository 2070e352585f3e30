"""What a test leaves besides its numbers: a row for each image, pictures for TensorBoard, and the page about the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cifar_lit.data.datamodule import ImageData
from cifar_lit.files import write_text
from cifar_lit.runs.charts import GALLERY_SIZE
from cifar_lit.runs.loggers import TensorBoardCurves
from cifar_lit.runs.predictions import PredictionTable, prediction_table
from cifar_lit.runs.report import render, run_content
from cifar_lit.training.metrics import Score


def draw(
    board: TensorBoardCurves, part: str, score: Score, found: Mapping[str, Tensor] | None, data: ImageData, step: int
) -> None:
    """Gives TensorBoard the confusion matrix and the accuracy of each class, and of each image's outcome the galleries.

    part: `val` or `test`, what was scored. found: what was gathered of each image, None where only the score is known.
    """
    from cifar_lit.runs import tensorboard_images as figures

    matrix = torch.tensor(score.confusion)
    pictures = {
        "confusion_matrix": figures.confusion_matrix(matrix, data.classes),
        "accuracy_per_class": figures.class_accuracies(matrix, data.classes),
    }
    if found is not None:
        outcomes = prediction_table(found)
        images = data.test_images if part == "test" else data.train_images
        chosen = {
            "confident_mistakes": outcomes.confident_mistakes(GALLERY_SIZE),
            "doubtful_hits": outcomes.doubtful_hits(GALLERY_SIZE),
        }
        for name, places in chosen.items():
            captions = _captions(outcomes, places, data.classes)
            pictures[name] = figures.gallery(images.images[outcomes.indices[places]], captions)
    for name, picture in pictures.items():
        board.log_images(f"{part}/{name}", picture, step)
    board.save()


def _captions(outcomes: PredictionTable, places: Tensor, classes: tuple[str, ...]) -> list[tuple[str, str]]:
    chosen = zip(
        *(values[places].tolist() for values in (outcomes.labels, outcomes.predicted, outcomes.probability)), strict=True
    )
    return [(f"true {classes[label]}", f"{probability:.3f} {classes[said]}") for label, said, probability in chosen]


def write_page(run: Path, metrics: dict[str, Any], found: Mapping[str, Tensor], data: ImageData) -> None:
    """Writes report.html, but for what takes a pass over the training images: `cifar-lit report` adds that."""
    write_text(run / "report.html", render(run_content(run, metrics, data, prediction_table(found))))
