"""Training, classify and load prepare pictures identically, for each `resize` and for images that are not square.

`test_serve.py` tests the service, and `tests/docs/test_using_page.py` an exported file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from contract.command_line import rows_of, run_command
from odd_files import encoded, jpeg
from PIL import Image
from torch import Tensor

import cifar_lit
from cifar_lit.data.settings import RESIZES
from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.model_file import load_model_file
from cifar_lit.run.images import run_image_data

HEIGHT, WIDTH = 24, 40
TRAINING = (
    *("--recipe", "folder", "--data-dir", "own", "--data.image_size", f"{HEIGHT}x{WIDTH}"),
    *("--epochs", "2", "--batch-size", "5"),
    *("--net", "whitened", "--model.width", "1", "--model.net_options", "{widths: [8, 8]}", "--model.tta", "full"),
    *(
        "--whitening",
        "--resolutions.sides",
        "{12: 0.5}",
        "--data.augment.crop",
        "2",
        "--data.augment.cutout",
        "6",
        "--data.val_size",
        "0.2",
    ),
    *("--accelerator", "cpu", "--precision", "32-true"),
)


def odd_pictures() -> dict[str, bytes]:
    """Return pictures of many proportions and modes. Every part of a picture looks different."""
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    whole, exif = Image.fromarray(colours).resize((900, 400), Image.Resampling.BICUBIC), Image.Exif()
    exif[0x0112] = 6
    clear = whole.resize((50, 50)).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize((50, 50)))
    deep = Image.fromarray(np.asarray(whole.resize((50, 20)).convert("L")).astype(np.uint16) * 257)
    return {
        "turned.jpg": jpeg(whole.resize((90, 40)), exif=exif),
        "large.jpg": jpeg(whole),
        "large-turned.jpg": jpeg(whole, exif=exif),
        "cmyk.jpg": jpeg(whole.resize((33, 71)).convert("CMYK")),
        "deep.png": encoded(deep, "PNG"),
        "palette.png": encoded(whole.resize((40, 24)).quantize(16), "PNG"),
        "alpha.png": encoded(clear, "PNG"),
        "thin.webp": encoded(whole.resize((200, 2)), "WEBP", lossless=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the working folder; each class has all pictures, in training and test."""
    folder = tmp_path_factory.mktemp("preparation")
    for part in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder / "own" / part).mkdir(parents=True)
        for name, data in odd_pictures().items():
            (folder / "own" / part / name).write_bytes(data)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CIFAR_LIT_CACHE", str(folder / "cache"))
        yield folder


def trained(folder: Path, resize: str) -> Path:
    """Return the run folder of a training; the first call trains."""
    run = folder / f"logs-{resize}/folder-1"
    if not run.exists():
        answer = run_command(*TRAINING, "--data.resize", resize, "--logs", run.parent)
        assert answer.code == 0, answer.err
    return run


def images_of_test(run: Path) -> Tensor:
    """Return the test images of the run, uint8 (N, C, H, W), in the order of their paths."""
    return run_image_data(run, load_model_file(run).card).test_images.images.permute(0, 3, 1, 2)


@pytest.mark.parametrize("resize", RESIZES)
def test_pictures_are_prepared_exactly_as_the_test_images(folder: Path, resize: str) -> None:
    run, paths = trained(folder, resize), sorted(map(str, folder.glob("own/test/*/*")))
    images, classifier = images_of_test(run), cifar_lit.load(run)
    assert images.shape == (16, 3, HEIGHT, WIDTH) and len(images[:8].flatten(1).unique(dim=0)) == 8
    assert torch.equal(classifier.prepare(paths), images)
    (rows,) = classify_files(classifier, [ImageFile(path) for path in paths], 1)
    assert [row.novelty for row in rows] == [each.novelty for each in classifier.predict_batch(images, 1)]
    tested = rows_of(run / "predictions.csv")
    assert [row.top[0][0] for row in rows] == [row["predicted"] for row in tested]
    pictures = [Image.open(path) for path in paths if path.endswith(".png")]  # JPEGs are decoded at a smaller size
    assert torch.equal(classifier.prepare(pictures), images[[path.endswith(".png") for path in paths]])


def test_12_bit_pictures_are_scaled_as_in_the_training(folder: Path) -> None:
    root = folder / "thermal"
    for number in range(12):
        values = np.random.default_rng(number).integers(7000, 7400, (20, 30)).astype(np.uint16)
        path = root / ("train", "train", "test")[number % 3] / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(path)
    logs = folder / "logs-thermal"
    settings = ("--data.channels", "1", "--epochs", "1", "--net", "lenet", "--accelerator", "cpu", "--logs", logs)
    answer = run_command("--recipe", "folder", "--data-dir", root, *settings)
    assert answer.code == 0, answer.err
    run, paths = logs / "folder-1", sorted(map(str, root.glob("test/*/*")))
    images, classifier = images_of_test(run), cifar_lit.load(run)
    assert images.unique().numel() > 200
    assert torch.equal(classifier.prepare(paths), images)
    assert torch.equal(classifier.prepare([Image.open(path) for path in paths]), images)
    data = run_image_data(run, load_model_file(run).card, data_dir=str(root / "train"))  # other images
    assert data.train_images.levels == tuple(classifier.card.levels)
