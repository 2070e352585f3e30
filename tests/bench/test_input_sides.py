"""Both sides of `bench input` hand over the same kind of batches."""

from __future__ import annotations

import pytest
import torch

from cifar_lit.bench.input import OURS, in_turn, sides
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet

CPU = torch.device("cpu")


@pytest.fixture
def data() -> ImageData:
    """Images of a single colour, which crops and flips leave alone, with labels that the colour tells."""
    labels = torch.arange(60) % 10
    images = (20 * labels + 10).to(torch.uint8)[:, None, None, None].expand(60, 12, 8, 3).contiguous()
    found = ImageData("shapes", batch_size=10, val_size=0, crop=4, flip="random")
    found.__dict__["train_images"] = ImageSet(images, labels, tuple("abcdefghij"))
    return found


def test_every_side_gives_normalised_images_with_their_labels(data: ImageData) -> None:
    mean, std = (torch.tensor(values)[:, None, None] for values in data.statistics)
    for name, turn in sides(data, 3, CPU).items():
        stream = turn()
        for _ in range(4):  # one to start with, three that are counted
            images, labels = next(stream)
            assert (images.dtype, images.shape) == (torch.float32, (10, 3, 12, 8)), name
            assert labels.dtype == torch.int64, name
            colours = 255 * (images * std + mean)
            torch.testing.assert_close(colours, (20.0 * labels + 10)[:, None, None, None].expand_as(colours), atol=0.01, rtol=0)
        if name != OURS:
            assert next(stream, None) is None, name  # so that no worker is busy in the others' turns


def test_every_side_moves_its_images(data: ImageData) -> None:
    images = torch.arange(60 * 12 * 8 * 3).remainder(251).to(torch.uint8).view(60, 12, 8, 3)
    data.__dict__["train_images"] = ImageSet(images, torch.arange(60) % 10, tuple("abcdefghij"))
    rows = {tuple(image.flatten().tolist()) for image in images}
    mean, std = (torch.tensor(values)[:, None, None] for values in data.statistics)
    for name, turn in sides(data, 3, CPU).items():
        batch, _ = next(turn())
        back = (255 * (batch * std + mean)).round().to(torch.uint8).permute(0, 2, 3, 1)
        unmoved = sum(tuple(image.flatten().tolist()) in rows for image in back)
        assert unmoved <= 3, name  # one in 162 is expected to be


def test_sides_take_turns_and_the_first_round_is_not_counted(data: ImageData) -> None:
    speeds = in_turn(sides(data, 2, CPU), 2, 3, CPU)
    assert len(speeds) == 4
    assert all(len(values) == 3 and min(values) > 0 for values in speeds.values())
