"""How unusual and damaged image files are handled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from odd_files import odd_files, picture

from cifar_lit.data.photos.decode import Preparation, decode
from cifar_lit.data.photos.folder import folder
from cifar_lit.data.settings import DataSettings, Images, Loading
from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.load import load


def test_unusual_files_are_decoded_or_refused(run: Path, tmp_path: Path) -> None:
    odd = odd_files()
    paths = [tmp_path / "set" / "train" / f"{number:03}" / file.name for number, file in enumerate(odd)]
    for path, file in zip(paths, odd, strict=True):  # one class per file, with a readable neighbour
        for class_dir in (path.parent, tmp_path / "set" / "test" / path.parent.name):
            class_dir.mkdir(parents=True)
            picture().save(class_dir / "beside.png")
        path.write_bytes(file.data)
    rows = [row for chunk in classify_files(load(run), [ImageFile(str(path)) for path in paths], 3) for row in chunk]
    images, loading = Images(image_size=32, skip_bad=True), Loading(cache_dir=str(tmp_path / "cache"))
    settings = DataSettings(str(tmp_path / "set"), images, loading)
    counts = folder(settings, train=True).labels.bincount(minlength=len(paths)).tolist()
    for path, file, row, count in zip(paths, odd, rows, counts, strict=True):
        if isinstance(file.expected, str):
            assert row.error and "\n" not in row.error and count == 1, (file.what, row.error)
            continue
        assert (row.error, count) == (None, 2), file.what
        pixels = decode(path, Preparation((32, 32))).astype(int)
        means = [pixels[y : y + 4, x : x + 4].mean((0, 1)) for y, x in ((6, 6), (6, 22), (22, 6), (22, 22))]
        assert np.abs(np.array(means) - np.array(file.expected)).max() < 25, file.what
