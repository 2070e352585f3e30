"""Short trainings on drawn images for the tests of measurements; makes scripts/benchmarks importable."""

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
model: {net: lenet, lr: 0.05, momentum: 0.9}
data: {dataset: shapes, image_size: 16, num_classes: 4, count: 100, val_size: 20, batch_size: 32}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder with the recipe small.yaml; restores the settings of the process."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    precision, threads, sources = torch.get_float32_matmul_precision(), torch.get_num_threads(), dict(SOURCES)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    torch.set_num_threads(1)  # nets this small only wait for a second thread
    yield tmp_path
    SOURCES.update(sources)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def small_subject() -> Callable[..., Subject]:
    """LeNet on 100 images of 16 pixels: six batches of 16 and one of 4."""

    def make(precision: str = "32-true", batch_size: int = 16, **model: Any) -> Subject:
        images: dict[str, Any] = {
            "dataset": "shapes",
            "count": 120,
            "val_size": 20,
            "image_size": 16,
            "mean": 0.5,
            "std": 0.25,
        }
        images |= {"crop": 2, "flip": "random", "batch_size": batch_size}
        loaded, classifier = build({"net": "lenet", "lr": 0.05, **model}, images)
        return Subject(classifier, loaded, {"accelerator": "cpu", "devices": 1, "precision": precision})

    return make
