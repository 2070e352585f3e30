from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest
from command_line import SMALL, Typed, typed

from cifar_lit.data.datamodule import ImageData


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the recipe small.yaml."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Typed]:
    """The run folder of a training with its test, and what the training printed; to be left as it is."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "small.yaml").write_text(SMALL)
    with chdir(folder):
        answer = typed("--recipe", "small.yaml")
    return folder / "lightning_logs" / "small-1", answer


@pytest.fixture
def run(training: tuple[Path, Typed]) -> Path:
    """The run folder of a training with its test; to be left as it is."""
    return training[0]


@pytest.fixture(scope="session")
def data() -> ImageData:
    """The images of the training."""
    return ImageData(dataset="shapes", image_size=16, num_classes=4, count=200, val_size=40)
