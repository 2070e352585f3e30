from pathlib import Path

import pytest

from cifar_lit.data.datamodule import ImageData


@pytest.fixture(autouse=True)
def in_working_folder(working_folder: Path) -> None:
    """Run each test of this folder in its own working folder."""


@pytest.fixture(scope="session")
def data() -> ImageData:
    """Return the data set of the recipe small.yaml."""
    return ImageData(dataset="shapes", val_size=40, images={"image_size": 16, "num_classes": 4, "count": 200})
