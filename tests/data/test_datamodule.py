"""`ImageData`: parts, statistics, placement, positions, and batches on their device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_images import save
from small_data import shapes_data, trainer_at
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.preprocessing import shrink
from cifar_lit.data.settings import Split


def rows_of(loader: Any) -> list[int]:
    return torch.cat([batch.indices for batch in loader]).tolist()


def test_loaders_and_shapes_follow_the_images() -> None:
    data = shapes_data(channels=1, num_classes=4)
    assert data.input_shape == [1, 12, 12] and data.class_count == len(data.classes) == 4
    assert sorted(rows_of(data.train_dataloader())) == data.split[0].tolist()
    assert rows_of(data.val_dataloader()) == data.split[1].tolist() and len(data.split[1]) == 10
    for loader in (data.test_dataloader(), data.predict_dataloader()):
        assert rows_of(loader) == list(range(12))  # a fifth of the training images
    everything = shapes_data(val_size=0)
    assert everything.val_dataloader() == [] and len(everything.split[0]) == 60


def test_too_few_images_of_a_class_or_set_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("cat", 12), ("dog", 1)):
        for part in ("train", "test"):
            for number in range(count):
                save(tmp_path / f"pets/{part}/{name}/{number}.png", 20 * number)
    ImageData("folder", str(tmp_path / "pets"), val_size=3).setup("fit")
    err = capsys.readouterr().err
    assert "1 of 2 classes have fewer than 2 training images (dog): add more\n" in err
    assert "the best epoch is chosen on 3 validation images only: raise --data.val_size, or set it to 0" in err
    shapes_data(count=400, val_size=40).setup("fit")
    ImageData("folder", str(tmp_path / "pets"), val_size=0).setup("validate")
    assert "chosen" not in capsys.readouterr().err


def test_the_seed_of_the_run_changes_the_order_but_not_images_or_split() -> None:
    first, second = (shapes_data(seed=seed) for seed in (0, 1))
    assert torch.equal(first.split[1], second.split[1])
    assert torch.equal(first.train_images.images, second.train_images.images)
    assert not torch.equal(shapes_data(split=Split(seed=1)).train_images.images, first.train_images.images)
    assert rows_of(first.train_dataloader()) != rows_of(second.train_dataloader())


# ---- placement


@pytest.mark.parametrize("rank", [0, 1])
def test_a_memory_mapped_file_gives_each_device_the_same_batches(tmp_path: Path, rank: int) -> None:
    for number in range(24):
        save(tmp_path / "pets" / ("cat", "dog")[number % 2] / f"{number}.png", number)
    batches: list[list[Any]] = []
    for placement in ("device", "host"):
        data = ImageData("folder", str(tmp_path / "pets"), 6, augment={"crop": 2}, loading={"placement": placement})
        data.trainer = trainer_at(0, 1, global_rank=rank)
        loader = data.train_dataloader()
        assert loader.workers == (2 if placement == "host" else 0)
        batches.append([[part.tolist() for part in (each.images, each.labels, each.indices)] for each in loader])
        assert data.placed("train").images.mapped == (placement == "host")
    assert batches[0] == batches[1] and len(batches[0]) == 3


# ---- progressive resizing

SQUARES = [*((32, 32, side, side) for side in (4, 16, 20, 31, 32)), (28, 28, 21, 21)]
RECTANGLES = [(64, 48, 32, 24), (48, 64, 24, 32), (30, 45, 20, 30), (9, 7, 5, 4), (256, 64, 16, 4)]


@pytest.mark.parametrize(("height", "width", "side", "across"), [*SQUARES, *RECTANGLES])
@pytest.mark.parametrize("channels", [1, 3])
def test_shrink_equals_area_interpolation(height: int, width: int, side: int, across: int, channels: int) -> None:
    images = torch.randint(0, 256, (7, height, width, channels), dtype=torch.uint8)
    before, small = images.clone(), shrink(images, side)
    assert small.dtype == torch.float32 and torch.equal(images, before)
    expected = F.interpolate(images.permute(0, 3, 1, 2).double(), (side, across), mode="area").permute(0, 2, 3, 1)
    torch.testing.assert_close(small.double(), expected, rtol=0, atol=1e-4)


def test_only_training_images_are_shrunk() -> None:
    data = shapes_data(mean=0.5, std=0.25)
    batch = next(iter(data.train_dataloader()))
    data.side = {0: 8, 1: None}.get  # by epoch, as the feature resolutions sets it

    def prepared(epoch: int, training: bool = True) -> Tensor:
        data.trainer = trainer_at(epoch, 2, training)
        images: Tensor = data.on_after_batch_transfer(batch, 0).images
        return images

    small = prepared(0)
    expected = F.interpolate(batch.images.permute(0, 3, 1, 2).float(), (8, 8), mode="area")
    torch.testing.assert_close(small, (expected / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-5)
    assert small.is_contiguous(memory_format=torch.channels_last)
    assert prepared(1).shape[2:] == prepared(0, training=False).shape[2:] == (12, 12)
