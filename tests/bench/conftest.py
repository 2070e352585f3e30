"""Trainings of a few steps on drawn images, for measurements to measure; scripts/benchmarks can be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.bench.training import Subject, build

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))
torch.set_num_threads(1)  # nets this small only wait for a second thread


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """What a measurement sets for its process is put back."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small_subject() -> Callable[..., Subject]:
    """Makes LeNet on 100 images of 16 pixels, in steps of 16 with a rest of 4."""

    def make(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, precision: str = "32-true") -> Subject:
        images = {"dataset": "shapes", "count": 120, "val_size": 20, "image_size": 16, "batch_size": 16, "mean": 0.5, "std": 0.25}
        loaded, classifier = build({"net": "lenet", "lr": 0.05, **(model or {})}, {**images, **(data or {})})
        return Subject(classifier, loaded, "cpu", 1, precision, {})

    return make
