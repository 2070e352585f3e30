"""How unusual and damaged image files are handled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from odd_files import OddFile, odd_files, picture

from cifar_lit.data.decode import decode
from cifar_lit.data.folder import folder
from cifar_lit.data.formats import IMAGES
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.load import load

READ, LEFT_OUT, UNSEEN = "read", "skipped", "ignored"  # a folder ignores files without an image suffix


def outcomes(odd: list[OddFile], run: Path, work_dir: Path) -> list[dict[str, str]]:
    """Return name, kind, and the outcome of `classify` and of a data set of folders for each file."""
    paths = [work_dir / "train" / f"{number:03}" / file.name for number, file in enumerate(odd)]
    for path, file in zip(paths, odd, strict=True):  # one class per file, with a readable neighbour
        for class_dir in (path.parent, work_dir / "test" / path.parent.name):
            class_dir.mkdir(parents=True)
            picture().save(class_dir / "beside.png")
        path.write_bytes(file.data)
    rows = [row for chunk, _ in classify_files(load(run), [ImageFile(str(path)) for path in paths]) for row in chunk]
    cache = str(work_dir / "cache")
    images = folder(SourceSettings(root=str(work_dir), image_size=32, skip_bad=True, cache_dir=cache), train=True)
    counts = images.labels.bincount(minlength=len(paths)).tolist()
    return [
        {
            "name": ascii(file.name)[1:-1],
            "what": file.what,
            "classify": row.error or READ,
            "folder": UNSEEN if not file.name.lower().endswith(IMAGES) else READ if count == 2 else LEFT_OUT,
        }
        for file, row, count in zip(odd, rows, counts, strict=True)
    ]


def test_unusual_files_are_decoded_or_refused(run: Path, tmp_path: Path) -> None:
    odd = odd_files()
    files = outcomes(odd, run, tmp_path / "set")
    for number, (made, file) in enumerate(zip(odd, files, strict=True)):
        readable = not isinstance(made.expected, str)
        assert (file["classify"] == READ) == readable, file
        assert file["folder"] in (UNSEEN, READ if readable else LEFT_OUT), file
        if isinstance(made.expected, str):
            assert "\n" not in file["classify"], file
        else:
            pixels = decode(tmp_path / "set" / "train" / f"{number:03}" / made.name, (32, 32)).astype(int)
            means = [pixels[y : y + 4, x : x + 4].mean((0, 1)) for y, x in ((6, 6), (6, 22), (22, 6), (22, 22))]
            assert np.abs(np.array(means) - np.array(made.expected)).max() < 25, file
