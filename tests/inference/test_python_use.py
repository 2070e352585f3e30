from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from odd_files import picture
from PIL import Image
from small_net import write_net

import cifar_lit
from cifar_lit.data.decode import DecodeError, decode
from cifar_lit.errors import Failure
from cifar_lit.inference.classify import natural
from cifar_lit.inference.explain import activation_maps

MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LA", "PA", "RGBX", "RGBa", "La", "I;16", "F"]


def in_mode(mode: str, size: int = 48) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.asarray(picture(size, "L")).astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(np.asarray(picture(size, "L")).astype(np.float32) / 255)
    if mode == "PA":
        return picture(size, "P").convert("PA")
    return picture(size, {"RGBa": "RGBA", "La": "LA"}.get(mode, "RGB")).convert(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_any_mode_is_taken(tmp_path: Path, mode: str, channels: int) -> None:
    classifier = cifar_lit.load(write_net(tmp_path, channels=channels))
    pixels = classifier.prepare(in_mode(mode))[0].permute(1, 2, 0)
    assert pixels.shape == (32, 32, channels)
    grey = channels == 1 or mode in ("1", "L", "LA", "La", "I;16", "F")
    wanted = np.asarray(picture(mode="L").convert("RGB") if grey else picture())[..., :channels]
    for row, column in ((4, 4), (4, 24), (24, 4), (24, 24)):
        seen = pixels[row : row + 4, column : column + 4].float().mean((0, 1)).numpy()
        if mode == "1":
            assert seen.min() >= 0  # dithered
        else:
            assert np.abs(seen - wanted[row * 3 // 2, column * 3 // 2]).max() < 6


def test_a_picture_gives_what_its_file_gives(run: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(80).crop((0, 0, 80, 50)).save(tmp_path / "a.png", exif=exif)
    classifier = cifar_lit.load(run)
    with Image.open(tmp_path / "a.png") as opened:
        assert torch.equal(classifier.prepare(opened), classifier.prepare(tmp_path / "a.png"))
    assert np.array_equal(
        classifier.prepare(str(tmp_path / "a.png"))[0].permute(1, 2, 0).numpy(), decode(tmp_path / "a.png", (32, 32))
    )


def test_floating_pixels_outside_of_0_to_1_are_refused(run: Path) -> None:
    with pytest.raises(DecodeError, match=r"floating pixels must lie in 0 … 1"):
        cifar_lit.load(run).predict(Image.new("F", (8, 8), 200.0))


def test_one_picture_and_many_of_all_kinds_give_the_same_prediction(run: Path, tmp_path: Path) -> None:
    classifier = cifar_lit.load(run)
    image = picture(32)
    image.save(tmp_path / "a.png")
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    alone = classifier.predict(image)
    assert len(alone) == 1
    many = classifier.predict([str(tmp_path / "a.png"), tmp_path / "a.png", image, array, tensor, array / np.float64(255)])
    assert {found.label for found in many} == {alone[0].label}
    assert max(abs(found.probability - alone[0].probability) for found in many) < 1e-5
    assert [found.label for found in classifier.predict(np.stack([array, array]))] == [alone[0].label] * 2


def test_activation_maps_are_shares_of_the_strongest_place_in_the_size_of_the_images(run: Path) -> None:
    classifier = cifar_lit.load(run)
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    maps = activation_maps(classifier.net, images)
    assert maps.shape == (5, 32, 32) and not maps.requires_grad
    assert maps.min() >= 0 and (maps.amax((1, 2)) == 1).all()
    assert torch.allclose(activation_maps(classifier.net, images[2:3]), maps[2:3], atol=1e-4)  # each by itself
    assert not any(module._forward_hooks for module in classifier.net.modules())


@pytest.mark.parametrize("net", ["whitened", "lenet", "tudui", "fashion_cnn"])
def test_nets_with_maps_can_be_explained(tmp_path: Path, net: str) -> None:
    classifier = cifar_lit.load(write_net(tmp_path, net))
    assert activation_maps(classifier.net, torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)).shape == (2, 32, 32)


def test_names_are_sorted_as_one_counts() -> None:
    names = ["b10.png", "B2.png", "a.png", "1.png", "01.png", "b2.png", "10.png", "b.png"]
    assert sorted(names, key=natural) == ["01.png", "1.png", "10.png", "a.png", "B2.png", "b2.png", "b10.png", "b.png"]


def test_a_net_whose_answers_are_no_numbers_is_refused_rather_than_quoted(tmp_path: Path) -> None:
    classifier = cifar_lit.load(write_net(tmp_path))
    with torch.no_grad():
        for weight in classifier.net.net.parameters():
            weight.mul_(1e30)
    with pytest.raises(Failure, match="the net's answers are not finite numbers, as its weights are too large: use another"):
        classifier.predict(picture())
