from pathlib import Path

import pytest
from own_images import save


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder of all tests here."""
    monkeypatch.setenv("CIFAR_LIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with 3 + 2 images in train/ and 1 + 1 in test/, with grey values 0, 1, 2 … in path order."""
    names = ("train/cat/0", "train/cat/1", "train/cat/2", "train/dog/0", "train/dog/1", "test/cat/0", "test/dog/0")
    for value, name in enumerate(names):
        save(tmp_path / f"pets/{name}.png", value)
    return tmp_path / "pets"
