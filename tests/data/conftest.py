from pathlib import Path

import pytest
from own_images import save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train/ with 3 + 2 images and test/ with 1 + 1, whose grey values are 0, 1, 2 … in the order of the paths."""
    names = ("train/cat/0", "train/cat/1", "train/cat/2", "train/dog/0", "train/dog/1", "test/cat/0", "test/dog/0")
    for value, name in enumerate(names):
        save(tmp_path / f"pets/{name}.png", value)
    return tmp_path / "pets"
