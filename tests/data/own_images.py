"""Small folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grouped import grouped
from PIL import Image

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.folder import folder
from cifar_lit.data.settings import DataSettings


def save(path: Path, value: int = 0, size: tuple[int, int] = (8, 8)) -> Path:
    """Save a PNG of one grey value. `size` is (H, W)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], (value, value, value)).save(path)
    return path


def photo(seed: int, side: int = 96) -> Image.Image:
    """Return an image whose shapes and colours differ from those of every other seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def save_photo(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    photo(seed).save(path)
    return path


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def open_set(root: Path, train: bool = True, **settings: object) -> ImageSet:
    return folder(DataSettings(**grouped({"root": str(root), **settings})), train)


def values(root: Path, train: bool = True, **settings: object) -> list[int]:
    """Return the grey value of each image."""
    return open_set(root, train, **settings).images[:, 0, 0, 0].tolist()


def decodings(capsys: pytest.CaptureFixture[str]) -> int:
    """Return the number of images decoded since the last call, according to the progress lines."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("decoding images: ")]
    return sum(int(line.split()[2].partition("/")[0]) for line in lines)
