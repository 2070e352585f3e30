"""Trainings of a few steps on drawn images, for measurements to measure."""

from __future__ import annotations

from typing import Any

from cifar_lit.bench.training import Subject, build

# For the command line: images that are drawn at once, a batch that leaves a rest.
SMALL = ["--dataset", "shapes", "--count", "90", "--batch-size", "16", "--accelerator", "cpu"]


def small_subject(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, precision: str = "32-true") -> Subject:
    """LeNet on 100 images of 16 pixels, in steps of 16 with a rest of 4."""
    images = {"dataset": "shapes", "count": 120, "val_size": 20, "image_size": 16, "batch_size": 16, "mean": 0.5, "std": 0.25}
    found, classifier = build({"net": "lenet", "lr": 0.05, **(model or {})}, {**images, **(data or {})})
    return Subject(classifier, found, "cpu", 1, precision, {})
