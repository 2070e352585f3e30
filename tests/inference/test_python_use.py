from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from odd_files import picture
from PIL import Image
from small_nets import write_net

import cifar_lit
from cifar_lit.data.photos.decode import DecodeError

GREY = ("L", "LA", "La", "I;16", "F")
MODES = (*GREY, "P", "RGB", "RGBA", "CMYK", "HSV", "PA", "RGBX", "RGBa")
DIRECT = {"P": "P", "PA": "P", "RGBa": "RGBA", "La": "LA"}  # modes to convert from


def in_mode(mode: str) -> Image.Image:
    grey = np.asarray(picture(mode="L"))
    if mode == "I;16":
        return Image.fromarray(grey.astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(grey.astype(np.float32) / 255)
    return picture(mode=DIRECT.get(mode, "RGB")).convert(mode)


def test_the_repr_shows_net_classes_size_and_test_accuracy(tmp_path: Path) -> None:
    run = write_net(tmp_path)
    shown = "Classifier(shapenet, 4 classes (cat, dog, eel and 1 more), images 3×32×32"
    assert repr(cifar_lit.load(run)) == f"{shown})"
    (run / "metrics.json").write_text(json.dumps({"test": {"accuracy": 0.94123, "images": 5}}))
    assert repr(cifar_lit.load(run)) == f"{shown}, test accuracy 0.9412)"


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_any_mode_are_accepted(tmp_path: Path, channels: int) -> None:
    classifier = cifar_lit.load(write_net(tmp_path, channels=channels))
    for mode in MODES:
        pixels = classifier.prepare(in_mode(mode))[0].permute(1, 2, 0)
        assert pixels.shape == (32, 32, channels)
        grey = channels == 1 or mode in GREY
        expected = np.asarray(picture(mode="L").convert("RGB") if grey else picture())[..., :channels]
        for row, column in ((4, 4), (4, 24), (24, 4), (24, 24)):
            mean = pixels[row : row + 4, column : column + 4].float().mean((0, 1)).numpy()
            assert np.abs(mean - expected[row * 3 // 2, column * 3 // 2]).max() < 6, mode


def test_paths_images_arrays_and_tensors_give_the_same_prediction(run: Path, tmp_path: Path) -> None:
    classifier = cifar_lit.load(run)
    image = picture(32)
    image.save(tmp_path / "a.png")
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    (alone,) = classifier.predict(image)
    assert (alone.label, alone.probability) == alone.top[0]
    kinds = [str(tmp_path / "a.png"), tmp_path / "a.png", image, array, tensor, array / 255.0]
    for prediction in [*classifier.predict(kinds), *classifier.predict(np.stack([array, array]))]:
        assert (prediction.label, prediction.probability) == (alone.label, pytest.approx(alone.probability, abs=1e-5))


@pytest.mark.parametrize(
    ("image", "error", "text"),
    [
        (Image.new("F", (8, 8), 200.0), DecodeError, "floating pixels must lie in 0 … 1"),
        (np.full((8, 8), 2.0), ValueError, "do not normalise it, or pass uint8"),
        (np.zeros((8, 8), np.int64), ValueError, "must be uint8, or floating-point in 0 … 1, not int64"),
        (np.zeros((8, 8, 5), np.uint8), ValueError, "an image must be"),
    ],
)
def test_invalid_images_are_refused(run: Path, image: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cifar_lit.load(run).predict(image)


def test_loading_and_predicting_import_no_training_packages(run: Path) -> None:
    code = f"cifar_lit.load({str(run)!r}).predict(numpy.zeros((9, 9)))"
    command = [sys.executable, "-c", f"import sys, cifar_lit, numpy; {code}; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    heavy = "lightning pytorch_lightning torchmetrics torchvision matplotlib jsonargparse tensorboard rich"
    assert not set(heavy.split()) & set(done.stdout.split())
