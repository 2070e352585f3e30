"""Images that stay in their file: the same batches, made by worker processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import Batch, read_ahead


def assert_same(batch: Batch, expected: Batch) -> None:
    for name in ("images", "labels", "indices"):
        one, other = getattr(batch, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert batch.loss_weight == expected.loss_weight


@pytest.fixture(scope="module")
def own_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 53 PNGs of noise in 3 classes, and the cache that it is mapped from."""
    root = tmp_path_factory.mktemp("own")
    generator = torch.Generator().manual_seed(0)
    for number in range(53):
        pixels = torch.randint(0, 256, (10, 8, 3), dtype=torch.uint8, generator=generator)
        for part in ("train", "test"):
            path = root / "pets" / part / ("cat", "dog", "hen")[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if part == "train" or number < 6:
                Image.fromarray(pixels.numpy()).save(path)
    return root


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches are made at once, so that workers have several blocks to make."""
    monkeypatch.setattr("cifar_lit.data.loaders.BLOCK_IMAGES", 24)


def folder_data(root: Path, placement: str, **settings: Any) -> ImageData:
    fixed = {"root": str(root / "pets"), "cache_dir": str(root / "cache"), "val_size": 6, "batch_size": 8}
    moves = {"crop": 2, "flip": "alternating", "cutout": 3}
    return ImageData("folder", placement=placement, **{**fixed, **moves, **settings})


@pytest.mark.parametrize("workers", [1, 3])
def test_a_file_gives_the_same_batches_as_memory_bit_for_bit(own_images: Path, workers: int, small_blocks: None) -> None:
    memory = folder_data(own_images, "device").train_dataloader()
    file = folder_data(own_images, "host", workers=workers).train_dataloader()
    assert (memory.workers, file.workers) == (0, workers)
    for epoch in (0, 1):
        for each in (memory, file):
            each.set_epoch(epoch)
        expected = list(memory)
        assert sum(len(batch.labels) for batch in expected) == 47
        for batch, other in zip(file, expected, strict=True):
            assert_same(batch, other)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_gives_each_device_its_part(own_images: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageData, "_rank", rank)
    monkeypatch.setattr(ImageData, "_world", 2)
    memory, file = (folder_data(own_images, place).train_dataloader() for place in ("device", "host"))
    for batch, expected in zip(file, memory, strict=True):
        assert_same(batch, expected)
    assert len(file) == 6


@pytest.mark.parametrize("position", [2, 5])
def test_a_file_goes_on_from_a_position_too(own_images: Path, position: int) -> None:
    memory, file = (folder_data(own_images, place).train_dataloader() for place in ("device", "host"))
    for each in (memory, file):
        each.load_state_dict({"epoch": 0, "position": position})
    batches = list(file)
    for batch, expected in zip(batches, memory, strict=True):
        assert_same(batch, expected)
    assert len(batches) == 6 - position


def test_labels_of_a_file_are_those_of_its_images(own_images: Path) -> None:
    data = folder_data(own_images, "host", crop=0, cutout=0, flip="none")
    for batch in data.train_dataloader():
        assert torch.equal(batch.labels, data.train_images.labels[batch.indices])
        assert torch.equal(batch.images, data.train_images.images[batch.indices])


def test_workers_leave_the_random_numbers_of_the_training_alone(own_images: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert len(list(folder_data(own_images, "host").train_dataloader())) == 6
    assert torch.equal(torch.rand(3), expected)


def test_more_workers_than_cores_are_no_reason_for_a_warning(
    own_images: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    assert len(list(folder_data(own_images, "host", workers=3).train_dataloader())) == 6
    assert not [warning for warning in recwarn if "worker" in str(warning.message)]


class Handlers:
    """Gives away how its process takes signals, as blocks."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> list[bool]:
        return [signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]


def test_workers_ignore_the_signals_that_stop_a_training() -> None:
    before = signal.getsignal(signal.SIGINT)
    blocks: Any = Handlers()
    assert list(read_ahead(blocks, 1, False)) == [[True, True]] * 2
    assert signal.getsignal(signal.SIGINT) is before


def children() -> set[str]:
    """Processes that this one has started and that still are."""
    return set(Path(f"/proc/self/task/{Path('/proc/self').resolve().name}/children").read_text().split())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list its processes in /proc")
def test_workers_end_with_an_epoch_that_is_left_in_its_middle(own_images: Path) -> None:
    before = children()
    batches = iter(folder_data(own_images, "host").train_dataloader())
    next(batches)
    assert len(children() - before) >= 2
    del batches
    deadline = time.monotonic() + 30
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not children() - before
