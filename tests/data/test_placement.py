"""Where the images are kept: the choice, and the same batches from either place."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from cifar_lit.data.augment import Augmentation
from cifar_lit.data.datamodule import CPU_CHUNK, DEVICE_CHUNK, LARGEST_SHARE, ImageData, choose_placement, free_memory, on_device
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.loaders import Batch, Chunk, ChunkMaker, TrainLoader
from cifar_lit.errors import UsageError


def test_images_go_to_the_device_up_to_half_of_its_free_memory() -> None:
    assert LARGEST_SHARE == 0.5
    assert choose_placement("auto", 500, 1000) == "device"
    assert choose_placement("auto", 501, 1000) == "host"
    assert choose_placement("auto", 10**15, None) == "device"


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("free", [0, 10**15, None])
def test_a_placement_that_was_asked_for_is_kept(placement: str, free: int | None) -> None:
    assert choose_placement(placement, 10**9, free) == placement


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"placement": "hots"}, r"data\.placement must be one of auto, device, host, not 'hots'\. Did you mean host\?"),
        ({"placement": "gpu"}, r"data\.placement must be one of auto, device, host, not 'gpu'\."),
        ({"chunk": -1}, r"data\.chunk must be 0 or more"),
        ({"workers": 0}, r"data\.workers at least 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as refused:
        ImageData("shapes", **settings)
    assert "\n" not in str(refused.value)


def test_the_free_memory_of_this_machine_is_some_and_not_more_than_all() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_set_where_it_should_be_is_not_copied() -> None:
    images = ImageSet(torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    assert on_device(images, torch.device("cpu")) is images


@pytest.mark.parametrize(("free", "where", "workers"), [(2048, "device", 0), (2047, "host", 2)])
def test_the_data_are_placed_by_the_size_of_their_images(
    free: int, where: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cifar_lit.data.datamodule.free_memory", lambda device: free)
    data = ImageData("shapes", count=16, image_size=8, channels=1, num_classes=2, val_size=0)
    assert data.train_images.images.nbytes == 1024
    assert data.placed("train")[1] == where
    assert data.train_dataloader().workers == workers


@pytest.mark.parametrize(("placement", "chunk"), [("host", CPU_CHUNK // 8), ("device", DEVICE_CHUNK // 8)])
def test_chunks_that_workers_hand_over_are_small_whatever_they_are_for(
    placement: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go through shared memory, of which a container may have 64 MB."""
    data = ImageData("shapes", count=20, image_size=8, val_size=4, batch_size=8, placement=placement, mean=0.5, std=0.5)
    data.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    monkeypatch.setattr(ImageData, "device", torch.device("meta"))
    monkeypatch.setattr("cifar_lit.data.datamodule.free_memory", lambda device: None)
    monkeypatch.setattr("cifar_lit.data.datamodule.on_device", lambda images, device: images)
    assert data.train_dataloader().chunk == chunk


def test_the_place_is_chosen_once_however_memory_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ImageData("shapes", count=20, image_size=8, val_size=4)
    assert data.placed("train")[1] == "device"
    monkeypatch.setattr("cifar_lit.data.datamodule.free_memory", lambda device: 0)
    assert data.placed("train")[1] == "device"
    assert data.placed("test")[1] == "host"


# ---- chunks


def image_set(count: int) -> ImageSet:
    images = torch.randint(0, 256, (count, 6, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return ImageSet(images, torch.arange(count) % 5, tuple("abcde"))


def loader(count: int, chunk: int, **settings: Any) -> TrainLoader:
    augmentation = Augmentation(crop=1, flip="random", cutout=2)
    options = {"seed": 3, "fill": torch.tensor([9, 8, 7], dtype=torch.uint8), **settings}
    return TrainLoader(image_set(count), torch.arange(count), 8, augmentation, chunk=chunk, **options)


def batches_of(chunks: Any) -> list[Batch]:
    return [batch for chunk in chunks for batch in chunk.batches()]


def assert_equal(found: Batch | Chunk, expected: Batch | Chunk) -> None:
    for name in ("images", "labels", "indices"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert found[3:] == expected[3:]


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("count", [41, 48, 50, 7])
@pytest.mark.parametrize("chunk", [2, 3, 4, 100])
def test_chunks_hold_the_batches_that_come_one_by_one(chunk: int, count: int, rank: int, world: int) -> None:
    single, several = (loader(count, size, rank=rank, world=world) for size in (1, chunk))
    for each in (single, several):
        each.set_epoch(2)
    chunks = list(several)
    assert len(chunks) == len(several) == -(-several.batch_count // chunk)
    assert [len(one.sizes) for one in chunks[:-1]] == [chunk] * (len(chunks) - 1)
    expected, found = batches_of(single), batches_of(chunks)
    assert len(expected) == len(found) == single.batch_count == several.batch_count
    for batch, other in zip(found, expected, strict=True):
        assert_equal(batch, other)


def test_the_last_batch_of_an_epoch_is_the_last_of_its_chunk() -> None:
    *_, last = loader(50, 4)
    assert (last.sizes, last.shares) == ((8, 8, 2), (1.0, 1.0, 1.0))
    assert len(last.images) == len(last.labels) == len(last.indices) == 18


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_batches_of_a_chunk_are_views_of_it(chunk: int) -> None:
    first = next(iter(loader(50, chunk)))
    place = first.images.untyped_storage().data_ptr()
    assert {batch.images.untyped_storage().data_ptr() for batch in first.batches()} == {place}


def test_a_position_is_counted_in_batches_that_were_handed_over() -> None:
    several = loader(50, 3)
    positions = []
    for _ in several:
        positions.append(several.state_dict()["position"])
    assert positions == [3, 6, 7]
    assert several.state_dict()["chunk"] == 3


@pytest.mark.parametrize("position", [1, 2, 6, 7])
def test_an_epoch_goes_on_from_any_batch(position: int) -> None:
    everything = batches_of(loader(50, 1))
    resumed = loader(50, 3)
    resumed.load_state_dict({"epoch": 0, "position": position, "chunk": 3})
    found = batches_of(resumed)
    assert len(found) == 7 - position
    for batch, other in zip(found, everything[position:], strict=True):
        assert_equal(batch, other)


def test_there_is_no_chunk_beyond_the_last() -> None:
    maker = ChunkMaker(loader(50, 3), 0)
    assert len(maker) == 3
    for number in (-1, 3):
        with pytest.raises(IndexError):
            maker[number]
