from pathlib import Path

import pytest
from contract.command_line import RECIPE

from cifar_lit.data.datamodule import ImageData


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the recipe small.yaml."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def data() -> ImageData:
    """The images of the training by small.yaml."""
    return ImageData(dataset="shapes", image_size=16, num_classes=4, count=200, val_size=40)
