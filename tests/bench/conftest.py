"""Short trainings on generated images for the benchmark tests; makes scripts/benchmarks importable."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_lit.data.sources import SOURCES

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts" / "benchmarks"))
from timed_fit import Subject, build

RECIPE = """trainer: {accelerator: cpu, max_epochs: 1, precision: 32-true}
model: {net: lenet, lr: 0.05, optimizer_options: {momentum: 0.9}}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 100, val_size: 20, batch_size: 32}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty folder with the recipe small.yaml, and restore process-wide settings at the end."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    precision, threads, sources = torch.get_float32_matmul_precision(), torch.get_num_threads(), dict(SOURCES)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    torch.set_num_threads(1)  # a second thread slows nets this small
    yield tmp_path
    SOURCES.update(sources)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def small_subject() -> Callable[..., Subject]:
    """Return a function that builds LeNet on 100 images of 16 × 16 pixels: six batches of 16 and one of 4."""

    def make(features: dict[str, Any] | None = None, **model: Any) -> Subject:
        images = {"dataset": "shapes", "count": 120, "val_size": 20, "image_size": 16, "mean": 0.5, "std": 0.25}
        data, classifier = build(
            {"net": "lenet", "lr": 0.05, **model},
            {**images, "augment": {"crop": 2, "flip": "random"}, "batch_size": 16},
        )
        trainer = {"accelerator": "cpu", "devices": 1, "precision": "32-true"}
        return Subject(classifier, data, trainer, features or {})

    return make
