"""Each batch operation equals torchvision's on every image, with the parameters of that image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as oracle

from cifar_lit.data import operations as ours

COUNT, HEIGHT, WIDTH = 24, 18, 26


@pytest.fixture(params=[3, 1], ids=["colours", "grey"])
def images(request: pytest.FixtureRequest) -> Tensor:
    """Return noise, then smooth, dark and bright images, and one of a single colour, uint8 (B, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (COUNT, request.param, HEIGHT, WIDTH), dtype=torch.uint8, generator=generator)
    noise[8:16] = oracle.gaussian_blur(noise[8:16], [9, 9], [3.0, 3.0])
    noise[16:18] //= 4
    noise[18:20] = 255 - noise[18:20] // 4
    noise[20] = 77
    return noise


def draws(least: float, most: float) -> Tensor:
    """Return parameters in random order, including both limits."""
    return torch.linspace(least, most, COUNT)[torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))]


def assert_alike(result: Tensor, expected: list[Tensor], levels: float) -> None:
    """Assert that no pixel differs by more than `levels` of 256."""
    assert result.dtype == torch.float32
    worst = (result - torch.stack(expected).float()).abs().flatten(1).amax(1)
    assert float(worst.max()) <= levels, worst


COLOURS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Tensor], Tensor, float]] = {
    "brightness": (ours.adjust_brightness, oracle.adjust_brightness, draws(0, 2), 1),
    "contrast": (ours.adjust_contrast, oracle.adjust_contrast, draws(0, 2), 2),
    "saturation": (ours.adjust_saturation, oracle.adjust_saturation, draws(0, 2), 2),
    "hue": (ours.adjust_hue, oracle.adjust_hue, draws(-0.5, 0.5), 1.01),
    "sharpness": (ours.adjust_sharpness, oracle.adjust_sharpness, draws(0, 2), 1.5),
    "posterize": (ours.posterize, lambda image, bits: oracle.posterize(image, int(bits)), draws(1, 8).round(), 0),
    "solarize": (ours.solarize, oracle.solarize, draws(0, 255), 0),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colour_operations_equal_torchvisions(name: str, images: Tensor) -> None:
    function, expected, parameters, levels = COLOURS[name]
    results = [expected(*pair) for pair in zip(images, parameters.tolist(), strict=True)]
    assert_alike(function(images.float(), parameters), results, levels)


def test_autocontrast_and_equalize_equal_torchvisions(images: Tensor) -> None:
    assert_alike(ours.autocontrast(images.float()), [oracle.autocontrast(image) for image in images], 1.001)
    assert_alike(ours.equalize(images.float()), [oracle.equalize(image) for image in images], 0)


def test_gaussian_blur_equals_torchvisions(images: Tensor) -> None:
    sigmas = draws(0.1, 2)
    pairs = zip(images, sigmas, strict=True)
    expected = [oracle.gaussian_blur(image.float(), [13, 13], [sigma] * 2) for image, sigma in pairs]
    assert_alike(ours.gaussian_blur(images.float(), sigmas, 6), expected, 0.01)


BOXES = torch.stack((draws(0, 7).floor(), draws(0, 9).flip(0).floor(), draws(1, 11).round(), draws(17, 1).round()), 1)


def test_erase_and_resized_crop_equal_torchvisions(images: Tensor) -> None:
    fill = torch.tensor([7.0, 200.0, 3.0])[: images.shape[1]]
    pairs = list(zip(images, BOXES.int().tolist(), strict=True))
    erased = [oracle.erase(image, *box, fill[:, None, None].byte()) for image, box in pairs]
    assert_alike(ours.erase(images.float(), BOXES, fill), erased, 0)
    cropped = [oracle.resized_crop(image.float(), *box, [HEIGHT, WIDTH]) for image, box in pairs]
    for source in (images, images.float()):
        assert_alike(ours.resized_crop(source.permute(0, 2, 3, 1), BOXES), cropped, 0.01)
    black = torch.zeros(len(fill))
    warped = ours.warp(images.float(), ours.crop_matrices(BOXES, HEIGHT, WIDTH)[:, :2], black)
    inner = torch.stack(cropped)[..., 9:-9, 13:-13]  # away from the border of the box
    assert torch.allclose(warped[..., 9:-9, 13:-13], inner, atol=0.01)


def test_rotation_and_perspective_equal_torchvisions(images: Tensor) -> None:
    black, floats = torch.zeros(images.shape[1]), images.float()
    options: dict[str, Any] = {"interpolation": v2.InterpolationMode.BILINEAR}

    def warped(matrices: Tensor) -> Tensor:
        return ours.warp(floats, matrices, black)

    angles = draws(-180, 179)
    expected = [oracle.rotate(image, angle, **options) for image, angle in zip(floats, angles.tolist(), strict=True)]
    assert_alike(warped(ours.rotation_matrices(angles, HEIGHT, WIDTH)[:, :2]), expected, 0.05)
    corners = torch.stack((draws(0, 5), draws(20, 25), draws(0, 4), draws(13, 17)))  # left, right, top, bottom
    corners = torch.stack([corners[[x, y]] for x, y in ((0, 2), (1, 2), (1, 3), (0, 3))]).permute(2, 0, 1).round()
    start = [[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]]
    ends = corners.int().tolist()
    expected = [oracle.perspective(image, start, end) for image, end in zip(floats, ends, strict=True)]
    assert_alike(warped(ours.perspective_matrices(corners, HEIGHT, WIDTH)), expected, 0.1)


def test_a_matrix_product_applies_moves_in_order_and_fills_empty_pixels(images: Tensor) -> None:
    fill, zeros = torch.tensor([9.0, 99.0, 199.0])[: images.shape[1]], torch.zeros(COUNT)
    size = (zeros + HEIGHT, zeros + WIDTH)
    boxes = ((zeros, zeros - 4, *size), (zeros + 3, zeros, *size))
    right, down = (ours.crop_matrices(torch.stack(box, 1), HEIGHT, WIDTH) for box in boxes)
    turn = ours.rotation_matrices(zeros + 180, HEIGHT, WIDTH)
    moved = ours.warp(images.float(), (right @ down @ turn)[:, :2], fill)
    shifted = [oracle.affine(image, 0, [4, -3], 1.0, [0.0, 0.0], fill=fill.tolist()) for image in images]
    assert_alike(moved, [image.rot90(2, (1, 2)) for image in shifted], 0.05)


@pytest.mark.parametrize(
    ("policy", "transform"), [("trivial", v2.TrivialAugmentWide()), ("randaugment", v2.RandAugment())]
)
def test_every_policy_operation_equals_torchvisions(policy: str, transform: Any, images: Tensor) -> None:
    table = ours.policy_magnitudes(policy, HEIGHT, WIDTH, torch.device("cpu"))
    space = transform._AUGMENTATION_SPACE
    assert tuple(space) == tuple(ours.OPERATIONS)
    assert [signed for _, signed in space.values()] == [0 < number <= ours.SIGNED for number in range(len(table))]
    for number, (name, (magnitudes, _)) in enumerate(space.items()):
        bins = magnitudes(ours.BINS, HEIGHT, WIDTH)
        levels = table[number] / 255 if name == "Solarize" else table[number]
        torch.testing.assert_close(levels, torch.zeros(ours.BINS) if bins is None else bins.float())
    generator = torch.Generator().manual_seed(2)
    floats, black = images.float(), torch.zeros(images.shape[1])
    for _ in range(8):
        operations = torch.randint(len(table), (COUNT,), generator=generator)
        bins = torch.randint(ours.BINS, (COUNT,), generator=generator)
        signs = torch.where((operations <= ours.SIGNED) & (torch.rand(COUNT, generator=generator) < 0.5), -1, 1)
        magnitudes = table[operations, bins] * signs
        result = ours.apply_operations(floats.clone(), operations, magnitudes, black)
        for image, number, magnitude, changed in zip(images, operations, magnitudes, result, strict=True):
            name = tuple(ours.OPERATIONS)[number]
            strength = float(magnitude) / 255 if name == "Solarize" else float(magnitude)
            bilinear = v2.InterpolationMode.BILINEAR
            expected = transform._apply_image_or_video_transform(image, name, strength, interpolation=bilinear, fill={})
            assert_alike(changed[None], [expected], 2)


@pytest.mark.parametrize("number", range(len(ours.OPERATIONS)))
def test_a_batch_with_one_operation_equals_its_parts(number: int, images: Tensor) -> None:
    operations, magnitudes = torch.full((COUNT,), number), torch.full((COUNT,), 3.0)
    fill = torch.full((images.shape[1],), 50.0)
    whole = ours.apply_operations(images.float(), operations, magnitudes, fill)
    operations[0] = 0  # a second group
    parts = ours.apply_operations(images.float(), operations, magnitudes, fill)
    torch.testing.assert_close(parts[1:], whole[1:], rtol=0, atol=1e-3)
    assert torch.equal(parts[0], images[0].float())
