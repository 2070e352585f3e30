from pathlib import Path

import pytest

from cifar_lit.data.datamodule import ImageData


@pytest.fixture(autouse=True)
def in_working_folder(working_folder: Path) -> None:
    """Every test here works in it."""


@pytest.fixture(scope="session")
def data() -> ImageData:
    """The images of the training by small.yaml."""
    return ImageData(dataset="shapes", image_size=16, num_classes=4, count=200, val_size=40)
