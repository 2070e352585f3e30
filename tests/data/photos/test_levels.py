"""16-bit grey images are scaled by the range of their data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from own_images import open_set
from PIL import Image

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.settings import Images, Split

SIDE = 40


def grey(seed: int) -> np.ndarray:
    """Return blocks of random grey, uint8 (SIDE, SIDE), that include black and white."""
    values = np.random.default_rng(seed).integers(0, 256, (8, 8))
    values[0, :4], values[1, :4] = 0, 255
    return np.kron(values, np.ones((5, 5))).astype(np.uint8)


def save_deep(root: Path, scale: float, offset: int = 0, suffix: str = "png", count: int = 6) -> Path:
    """Save 16-bit images with the values offset + scale · grey."""
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number:03}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((offset + scale * grey(number).astype(float)).round().astype(np.uint16)).save(path)
    return root


def save_plain(root: Path, count: int = 6) -> Path:
    for number in range(count):
        (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey(number)).save(root / "ab"[number % 2] / f"{number:03}.png")
    return root


@pytest.mark.parametrize(
    ("scale", "offset", "suffix"),
    [(16, 0, "png"), (1, 7000, "png"), (2, 30_000, "tif"), (4, 500, "pgm"), (257, 0, "png"), (140, 20_000, "png")],
)
def test_images_of_any_range_become_those_of_8_bits(tmp_path: Path, scale: float, offset: int, suffix: str) -> None:
    deep, plain = save_deep(tmp_path / "deep", scale, offset, suffix), save_plain(tmp_path / "plain")
    images = open_set(deep, channels=1, split=Split(folds=2))
    expected = open_set(plain, channels=1, split=Split(folds=2)).images.int()
    full = scale * 255 >= 32768  # such images may use all values, and keep their brightness
    if full:
        expected = ((expected * scale + offset) / 257).round().int()
    assert images.levels == (None if full else (offset, offset + 255 * scale))
    assert (images.images.int() - expected).abs().max() <= 1


def test_dead_pixels_and_blank_images_do_not_change_the_levels(tmp_path: Path) -> None:
    root = save_deep(tmp_path / "set", 2, 1000, count=60)
    path = root / "a/000.png"
    values = np.array(Image.open(path))
    values[20, 20], values[30, 30] = 0, 65535
    Image.fromarray(values).save(path)
    Image.fromarray(np.zeros((SIDE, SIDE), np.uint16)).save(root / "a/900.png")
    Image.fromarray(np.full((SIDE, SIDE), 65535, np.uint16)).save(root / "b/900.png")
    assert open_set(root, channels=1).levels == (1000, 1510)


def test_levels_may_be_set_and_are_named_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = save_deep(tmp_path / "set", 1, 1000)
    data = ImageData("folder", str(root), images={"channels": 1})
    assert data.train_images.levels == (1000, 1255)
    assert f"{root}: 16-bit values from 1,000 to 1,255 become black to white (--data.levels)" in capsys.readouterr().err
    data = ImageData("folder", str(root), images={"channels": 1, "levels": [1000, 1510]})
    assert data.train_images.levels == (1000, 1510) and 120 < data.train_images.images.max() < 130
    assert "16-bit values" not in capsys.readouterr().err
    for levels in ([5, 5], [9, 5]):
        with pytest.raises(UsageError, match=r"data.images.levels \[.*must be two values, of black and of white"):
            Images(levels=levels)
