"""Batches on any number of devices, in any epoch and position, with and without workers."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.signals import STOP_SIGNALS
from cifar_lit.data.augment import Augment
from cifar_lit.data.image_set import PADDING, Batch, ImageSet
from cifar_lit.data.loaders import EvalLoader, TrainLoader, epoch_order, read_ahead

MOVES: dict[str, Any] = {"augment": Augment("alternating", crop=2, cutout=3), "fill": torch.zeros(3).byte(), "seed": 5}


def image_set(count: int, size: int = 3) -> ImageSet:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.arange(count) % 5, tuple("abcde"))


def train_loaders(source: ImageSet, batch_size: int, world: int = 1, **settings: Any) -> list[TrainLoader]:
    settings = {"indices": torch.arange(len(source)), "augment": Augment(), "fill": MOVES["fill"], **settings}
    return [TrainLoader(source, batch_size=batch_size, rank=rank, world=world, **settings) for rank in range(world)]


def moved(source: ImageSet, rows: Tensor, epoch: int) -> Tensor:
    """Return the images at `rows` with the moves of `MOVES`."""
    augment = MOVES["augment"]
    keys = augment.move_keys(*source.images.shape[1:3], MOVES["seed"], epoch)
    return augment.move(source.images, rows, keys, MOVES["fill"])


def assert_same(batches: Sequence[Batch], others: Sequence[Batch]) -> None:
    for batch, other in zip(batches, others, strict=True):
        assert batch.loss_weight == other.loss_weight
        for name in ("images", "labels", "indices"):
            one, another = getattr(batch, name), getattr(other, name)
            assert torch.equal(one, another) and one.dtype == another.dtype


def counted_rows(step: Sequence[Batch]) -> list[int]:
    """Return the rows of a step's batches that count in the loss."""
    return [row for batch in step if batch.loss_weight for row in batch.indices.tolist()]


@pytest.mark.parametrize(("count", "batch_size"), [*product([5, 16, 101, 103], [4, 7, 8])])
def test_devices_share_global_batches_and_weighted_losses_average_to_the_mean(count: int, batch_size: int) -> None:
    losses = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = epoch_order(count, seed=4, epoch=0).tolist()
    expected = [order[start : start + batch_size] for start in range(0, count, batch_size)]
    if len(expected) > 1 and len(expected[-1]) == 1:
        expected.pop()  # batch norm needs two images
    for world in (1, 2, 3, 4):
        steps = list(zip(*train_loaders(image_set(count), batch_size, world, seed=4), strict=True))
        assert len(steps) == len(expected)
        for step, rows in zip(steps, expected, strict=True):
            assert counted_rows(step) == rows
            assert min(len(batch.indices) for batch in step) >= min(2, len(rows), batch_size // world)
            averaged = sum(batch.loss_weight * losses[batch.indices].mean() for batch in step) / world
            assert float(averaged) == pytest.approx(float(losses[rows].mean()), rel=1e-12)
            if len(rows) == batch_size and batch_size % world == 0:
                assert {batch.loss_weight for batch in step} == {1.0}


@pytest.mark.parametrize(("world", "batch_size", "block"), [(2, 8, 512), (3, 8, 24), (4, 20, 1), (1, 3, 512)])
def test_an_augmented_image_does_not_depend_on_devices_batches_or_blocks(
    world: int, batch_size: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = image_set(40, size=8)
    expected = moved(source, torch.arange(40), epoch=3)
    monkeypatch.setattr("cifar_lit.data.loaders.BLOCK_BYTES", block * 8 * 8 * 3)
    loaders = train_loaders(source, batch_size, world, **MOVES)
    for loader in loaders:
        loader.set_epoch(3)
    for batch in chain(*loaders):
        assert torch.equal(batch.images, expected[batch.indices])
        assert torch.equal(batch.labels, source.labels[batch.indices])


@pytest.mark.parametrize("stopped_after", [1, 3, 7])
def test_a_state_within_an_epoch_resumes_with_the_next_batch_on_any_number_of_devices(stopped_after: int) -> None:
    source = image_set(56, 8)
    (loader,), (resumed,), pair = (train_loaders(source, 8, world, **MOVES) for world in (1, 1, 2))
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(stopped_after):
        next(batches)
    assert loader.state_dict()["position"] == stopped_after  # independent of prefetching
    for other in (resumed, *pair):
        other.load_state_dict(loader.state_dict())
        other.set_epoch(2)
    remaining = list(batches)
    assert len(remaining) == 7 - stopped_after
    assert_same(list(resumed), remaining)
    for step, batch in zip(zip(*pair, strict=True), remaining, strict=True):
        assert torch.equal(torch.cat([part.images for part in step]), batch.images)
    for each in (loader, resumed):
        each.set_epoch(3)
    assert len(loader) == 7
    assert_same(list(resumed), list(loader))


def test_a_batch_without_an_image_for_each_device_is_refused() -> None:
    with pytest.raises(UsageError, match="raise --batch-size"):
        train_loaders(image_set(20), 3, 4)


@pytest.mark.parametrize(("count", "batch_size"), [*product([5, 17, 101], [4, 8])])
@pytest.mark.parametrize("world", [1, 3])
def test_a_plain_module_gets_equal_batch_counts_and_none_of_weight_0(count: int, batch_size: int, world: int) -> None:
    loaders = train_loaders(image_set(count), batch_size, world, weighted=False)
    steps = list(zip(*loaders, strict=True))
    assert len(steps) == len(loaders[0]) >= 1
    for step in steps:
        rows = list(chain(*(batch.indices.tolist() for batch in step)))
        assert len(set(rows)) == len(rows)
        assert all(len(batch.labels) and batch.loss_weight > 0 for batch in step)
        assert all(batch.labels.tolist() == [row % 5 for row in batch.indices.tolist()] for batch in step)
        if len(steps) > 1:  # enough for batch norm
            assert min(len(batch.labels) for batch in step) >= min(2, batch_size // world)


# ---- workers


def test_workers_give_bit_equal_batches_and_keep_random_state_and_handlers(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("cifar_lit.data.loaders.BLOCK_BYTES", 24 * 8 * 8 * 3)  # three batches: several blocks
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    handler = signal.getsignal(signal.SIGINT)
    torch.manual_seed(5)
    loaders = (train_loaders(image_set(47, 8), 8, 2, **MOVES, workers=count) for count in (0, 2))
    for without, with_workers in zip(*loaders, strict=True):
        for epoch, position in ((0, 0), (1, 2)):
            for loader in (without, with_workers):
                loader.set_epoch(epoch)
                loader.load_state_dict({"epoch": epoch, "position": position})
            assert_same(list(with_workers), list(without))
    state = torch.random.get_rng_state()
    assert torch.equal(state, torch.manual_seed(5).get_state()) and signal.getsignal(signal.SIGINT) is handler
    assert not [warning for warning in recwarn if "worker" in str(warning.message)]


def ignored_signals(block: Any) -> Any:
    return [signal.getsignal(each) is signal.SIG_IGN for each in STOP_SIGNALS]


def children() -> set[str]:
    """Return the running child processes."""
    return set(Path(f"/proc/self/task/{Path('/proc/self').resolve().name}/children").read_text().split())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list its processes in /proc")
def test_workers_ignore_stop_signals_and_end_with_an_interrupted_epoch() -> None:
    before = children()
    blocks = read_ahead([[]] * 9, ignored_signals, 2, False)
    assert next(blocks) == [True] * len(STOP_SIGNALS)
    assert len(children() - before) >= 2
    del blocks
    deadline = time.monotonic() + 30
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not children() - before


# ---- evaluation


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (2, 4), (3, 100)])
def test_evaluation_has_each_image_once_in_equal_batches_and_numbers_of_steps(world: int, batch_size: int) -> None:
    for count in (0, 1, 8, 9, 103):
        source, indices = image_set(count, size=1), torch.arange(count).flip(0)
        parts = [list(EvalLoader(source, indices, batch_size, rank=rank, world=world)) for rank in range(world)]
        assert {len(part) for part in parts} == {-(-count // (batch_size * world))}
        counted = [batch for batch in chain(*zip(*parts, strict=True)) if batch.labels[0] != PADDING]
        expected = [rows.tolist() for rows in indices.split(batch_size) if count]
        assert [batch.indices.tolist() for batch in counted] == expected
        for batch in counted:
            assert torch.equal(batch.images, source.images[batch.indices]) and batch.loss_weight == 1
            assert torch.equal(batch.labels, source.labels[batch.indices])
