"""Training on smaller images first: the sides by epoch, and images shrunk as area interpolation does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import Batch
from cifar_lit.data.resolution import LEAST_SIDE, check_resolutions, shrink, side_at
from cifar_lit.errors import UsageError


def noise(count: int, height: int, width: int, channels: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (count, height, width, channels), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("height", "width", "side", "across"),
    [
        *((32, 32, side, side) for side in (4, 8, 16, 20, 24, 28, 31, 32)),
        *[(28, 28, 14, 14), (28, 28, 21, 21), (64, 48, 32, 24), (48, 64, 24, 32), (30, 45, 20, 30), (9, 7, 5, 4)],
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_shrunk_image_is_that_of_area_interpolation(height: int, width: int, side: int, across: int, channels: int) -> None:
    images = noise(7, height, width, channels)
    small = shrink(images, side)
    assert small.dtype == torch.float32
    assert small.shape == (7, side, across, channels)
    for image, found in zip(images, small, strict=True):
        expected = F.interpolate(image.permute(2, 0, 1)[None].double(), (side, across), mode="area")[0].permute(1, 2, 0)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_shrinking_leaves_the_images_and_their_brightness_as_they_were() -> None:
    images = noise(5, 32, 32, 3)
    before = images.clone()
    small = shrink(images, 16)
    assert torch.equal(images, before)
    torch.testing.assert_close(small.mean((1, 2)), images.float().mean((1, 2)), rtol=1e-5, atol=1e-3)
    assert shrink(torch.full((2, 12, 12, 1), 255, dtype=torch.uint8), 8).max() <= 255.001


def test_a_side_between_halves_mixes_neighbouring_pixels() -> None:
    """4 of 6 pixels: area interpolation takes pixels 0–1, 1–2, 3–4, 4–5."""
    row = torch.tensor([0, 10, 20, 30, 40, 50], dtype=torch.uint8)
    images = row.view(1, 1, 6, 1).expand(1, 6, 6, 1).contiguous()
    assert shrink(images, 4)[0, 0, :, 0].tolist() == pytest.approx([5, 15, 35, 45])


@pytest.mark.parametrize(
    ("resolutions", "epochs", "sides"),
    [
        ({24: 0.4, 28: 0.3}, 10, [24] * 4 + [28] * 3 + [None] * 3),
        ({24: 0.5}, 3, [24] * 2 + [None]),  # 1.5 to the even number
        ({24: 0.5}, 5, [24] * 2 + [None] * 3),
        ({24: 0.4, 28: 0.3}, 1, [28]),  # 0.4 and 0.7 of one epoch
        ({24: 0.4, 28: 0.3}, 2, [24, None]),  # 0.8 and 1.4 of two epochs
        ({24: 1.0}, 4, [24] * 4),
        ({24: 0.5, 28: 0.5}, 6, [24] * 3 + [28] * 3),
        ({24: 0.1, 28: 0.2, 30: 0.7}, 10, [24] + [28] * 2 + [30] * 7),
        ({24: 0.01}, 8, [None] * 8),
        ({28: 0.25, 24: 0.25}, 8, [28] * 2 + [24] * 2 + [None] * 4),
        ({}, 3, [None] * 3),
    ],
)
def test_sides_follow_their_shares_in_their_order_with_ends_at_whole_epochs(
    resolutions: dict[int, float], epochs: int, sides: list[int | None]
) -> None:
    assert [side_at(resolutions, epoch, epochs) for epoch in range(epochs)] == sides


def test_shares_that_add_up_to_one_leave_no_epoch_over_by_rounding() -> None:
    assert side_at({24: 0.5}, 17, 10) is None  # beyond the last epoch
    for epochs in range(1, 200):
        assert side_at({8: 0.1, 12: 0.2, 16: 0.3, 20: 0.4}, epochs - 1, epochs) is not None


@pytest.mark.parametrize(
    ("resolutions", "line"),
    [
        ({40: 0.5}, r"data\.resolutions names 40 pixels: use 4 … 30 for these images"),
        ({3: 0.5}, "names 3 pixels: use 4 … 30"),
        ({24: 0.0}, r"gives 24 pixels a share of 0 of the epochs: use above 0, up to 1"),
        ({24: -0.5}, "a share of -0.5"),
        ({24: 1.5}, "a share of 1.5"),
        ({16: 0.6, 24: 0.5}, r"the shares in data\.resolutions add up to 1.1: at most 1"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused_in_one_line(resolutions: dict[int, float], line: str) -> None:
    with pytest.raises(UsageError, match=line) as refused:
        check_resolutions(resolutions, 30, 35)
    assert "\n" not in str(refused.value)


def test_schedules_at_the_ends_of_what_is_allowed_are_taken() -> None:
    check_resolutions({LEAST_SIDE: 0.1, 28: 0.2, 27: 0.7}, 28, 32)
    check_resolutions({5: 0.5, 32: 0.5}, 32, 28)
    check_resolutions({8: 1.0}, 8, 8)
    check_resolutions({}, 2, 2)
    check_resolutions({16: 0.5}, 256, 64)
    assert shrink(noise(1, 256, 64, 3), 16).shape == (1, 16, LEAST_SIDE, 3)
    with pytest.raises(UsageError, match="use 16 … 256 for these images"):  # so narrow that they would vanish
        check_resolutions({8: 0.5}, 256, 64)


def data(**settings: Any) -> ImageData:
    return ImageData("shapes", **{"count": 60, "image_size": 12, "val_size": 10, "mean": 0.5, "std": 0.25, **settings})


def test_a_schedule_is_checked_when_the_images_are_known() -> None:
    with pytest.raises(UsageError, match="names 24 pixels: use 4 … 12"):
        data(resolutions={24: 0.5}).train_dataloader()


class TrainerAt:
    """A Trainer that is in an epoch."""

    def __init__(self, epoch: int, epochs: int | None, training: bool) -> None:
        self.current_epoch, self.max_epochs, self.training = epoch, epochs, training
        self.global_rank, self.world_size, self.callbacks = 0, 1, ()


def prepared(epoch: int, epochs: int | None, batch: Any, training: bool = True, **settings: Any) -> Tensor:
    source = data(resolutions={8: 0.5}, **settings)
    source.trainer = TrainerAt(epoch, epochs, training)  # type: ignore[assignment]
    images: Tensor = source.on_after_batch_transfer(batch, 0).images
    return images


def test_training_images_are_shrunk_then_normalised() -> None:
    batch = next(iter(data(crop=2).train_dataloader()))
    small = prepared(0, 2, batch)
    expected = F.interpolate(batch.images.permute(0, 3, 1, 2).float(), (8, 8), mode="area")
    torch.testing.assert_close(small, (expected / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-5)
    assert small.is_contiguous(memory_format=torch.channels_last)
    for epoch, epochs in ((1, 2), (0, -1), (0, None)):  # the last two without an end
        assert prepared(epoch, epochs, batch).shape[2:] == (12, 12)


def test_images_to_evaluate_are_at_full_size_in_every_epoch() -> None:
    rows = torch.arange(5)
    source = data()
    batch = Batch(source.train_images.images[rows], source.train_images.labels[rows], rows)
    assert prepared(0, 2, batch, training=False).shape == (5, 3, 12, 12)
