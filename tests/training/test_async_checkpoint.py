"""Checkpoints that a thread writes equal those of a synchronous write, and are complete when a run ends."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import BATCHES, MOMENTUM, At, best_and_last, classifier, fitted, shapes_data
from torch import Tensor
from torch.utils._pytree import tree_flatten

from cifar_lit.errors import Failure
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.training.async_checkpoint import AsyncCheckpointIO, checkpoint_io
from cifar_lit.training.callbacks import RandomState
from cifar_lit.training.checkpoint import AtomicCheckpointIO, LastCheckpoint, read_checkpoint
from cifar_lit.training.orderly_stop import Interrupted, NoSignalHandlers, OrderlyStop

PATIENCE = 60  # seconds after which a write counts as blocked for ever
NAMES = ("best.ckpt", "last.ckpt", "previous.ckpt")


@pytest.fixture(autouse=True)
def _checkpoint_at_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastCheckpoint, "MIN_INTERVAL", 0.0)


class Disk:
    """A disk that blocks in each `torch.save` until `finish` is called, once or for good.

    Attributes:
        started: released once per write that has started.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self._allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._save = torch.save
        monkeypatch.setattr(torch, "save", self._blocked)

    def _blocked(self, *args: Any) -> None:
        self.started.release()
        assert self._allowed.acquire(timeout=PATIENCE)
        self._save(*args)

    def finish(self, writes: int = 10_000) -> None:
        self._allowed.release(writes)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Return a blocked disk. At the end of the test, it finishes its writes."""
    disk = Disk(monkeypatch)
    yield disk
    disk.finish()


def train(
    folder: Path, io: AtomicCheckpointIO, *more: Callback, resume: Path | None = None, keeps_best: bool = True
) -> pl.Trainer:
    """Train three epochs with momentum and averaged weights."""
    best, last = best_and_last(folder)
    model = classifier(net="shapenet", schedule="one_cycle", **MOMENTUM)
    kept = [best, last] if keeps_best else [last]
    callbacks = [WeightAverage(0.9), NoSignalHandlers(), *more, RandomState(), *kept, OrderlyStop(last)]
    return fitted(model, shapes_data(), *callbacks, resume=resume, max_epochs=3, plugins=io)


def assert_equal(one: Any, other: Any) -> None:
    """Assert that two checkpoints are bit-equal, except for the folder."""
    (values, structure), (other_values, other_structure) = tree_flatten(one), tree_flatten(other)
    assert structure == other_structure
    for value, expected in zip(values, other_values, strict=True):
        if isinstance(value, Tensor):
            assert torch.equal(value, expected) and value.stride() == expected.stride()
        elif not isinstance(value, str):
            assert value == expected


def test_training_continues_during_writes_and_ends_with_the_same_checkpoints(tmp_path: Path, disk: Disk) -> None:
    """Both writes of an epoch finish in the middle of the next, so that later steps could change them."""
    finish = [At(step, lambda *_: disk.finish(2)) for step in (BATCHES + 4, 2 * BATCHES + 4)]
    finish.append(At(3 * BATCHES, lambda *_: disk.finish()))
    train(tmp_path / "async", AsyncCheckpointIO(), *finish)
    train(tmp_path / "sync", AtomicCheckpointIO())
    for name in NAMES:
        contents, expected = (read_checkpoint(tmp_path / way / name) for way in ("async", "sync"))
        for checkpoint in (contents, expected):
            for state in checkpoint["callbacks"].values():
                state.pop("best_k_models", None)  # by path
        assert_equal(contents, expected)
        assert contents["state_dict"]._metadata == expected["state_dict"]._metadata


def test_a_run_that_died_during_a_write_resumes_bit_equal_from_the_checkpoint_before(
    tmp_path: Path, disk: Disk
) -> None:
    disk.finish(1)

    def die(*_: Any) -> None:
        for _ in range(2):
            assert disk.started.acquire(timeout=PATIENCE)
        for file in tmp_path.glob("run/*.ckpt"):  # a kill leaves only these complete files
            os.link(file, tmp_path / file.name)
        disk.finish()
        raise RuntimeError("failed on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path / "run", AsyncCheckpointIO(), At(2 * BATCHES + 3, die), keeps_best=False)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == BATCHES
    assert read_checkpoint(tmp_path / "run/last.ckpt")["global_step"] == 2 * BATCHES
    train(tmp_path / "whole", AtomicCheckpointIO(), keeps_best=False)
    for resumed in (tmp_path / "last.ckpt", tmp_path / "run/last.ckpt"):
        train(resumed.parent, AsyncCheckpointIO(), resume=resumed, keeps_best=False)
        first, second = (read_checkpoint(path / "last.ckpt") for path in (resumed.parent, tmp_path / "whole"))
        for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "random_state", "loops"):
            assert_equal(first[part], second[part])


@pytest.mark.parametrize("step", [3, 3 * BATCHES])
def test_a_stop_waits_for_the_write_of_its_checkpoint(tmp_path: Path, disk: Disk, step: int) -> None:
    """A signal in the last step ends the epoch first, then the training."""
    threading.Thread(target=lambda: disk.started.acquire(timeout=PATIENCE) and disk.finish()).start()
    with pytest.raises(Interrupted):
        train(tmp_path, AsyncCheckpointIO(), At(step, lambda *_: os.kill(os.getpid(), signal.SIGINT)))
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == step
    assert {path.name for path in tmp_path.iterdir()} <= {*NAMES}


def fail(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at_end_of_epoch(number: int, do: Callable[[], Any]) -> Callback:
    return LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.current_epoch == number and do())


@pytest.mark.parametrize(("epoch", "stopped"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_failed_write_ends_the_run_with_its_message_also_when_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int, stopped: bool
) -> None:
    io, Interrupted.latest = AsyncCheckpointIO(), None

    def fill() -> None:
        io.remove_checkpoint(tmp_path / "none.ckpt")  # waits for earlier writes
        monkeypatch.setattr(torch, "save", fail)
        if stopped:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Failure) as failure:
        train(tmp_path, io, at_end_of_epoch(epoch, fill))
    line = str(failure.value)
    assert line.startswith(f"cannot write {tmp_path}/") and "No space left on device. What was saved is intact" in line
    assert "\n" not in line and Interrupted.latest is None  # else the command prints how to resume
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == epoch * BATCHES


def test_the_error_of_several_writes_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", fail)
    io = AsyncCheckpointIO()
    for name in ("a", "b"):
        io.save_checkpoint({"state_dict": {}}, tmp_path / name)
    with pytest.raises(Failure, match=r"cannot write .*/a: No space left"):
        io.teardown()
    io.teardown()


def test_at_most_two_copies_wait_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    io, third = AsyncCheckpointIO(), threading.Event()
    for name in ("a", "b"):
        io.save_checkpoint({"state_dict": {}}, tmp_path / name)

    def save_third() -> None:
        io.save_checkpoint({"state_dict": {}}, tmp_path / "c")
        third.set()

    threading.Thread(target=save_third).start()
    assert disk.started.acquire(timeout=PATIENCE)
    assert not third.wait(0.1) and not list(tmp_path.glob("[abc]"))
    disk.finish(1)
    assert third.wait(PATIENCE) and (tmp_path / "a").exists()
    disk.finish()
    io.teardown()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_a_removal_and_a_save_after_the_fit_wait_for_earlier_writes(tmp_path: Path, disk: Disk) -> None:
    io, old = AsyncCheckpointIO(), tmp_path / "old.ckpt"
    io.save_checkpoint({"state_dict": {}}, old)
    threading.Timer(0.05, disk.finish).start()
    io.remove_checkpoint(old)
    io.teardown()
    assert not old.exists()
    io.save_checkpoint({"state_dict": {}}, old)
    assert old.exists()


def test_only_a_single_process_on_an_accelerator_writes_asynchronously() -> None:
    kinds = {(kind, count): type(checkpoint_io(kind, count)) for kind in ("cpu", "gpu", "mps") for count in (1, 2)}
    assert {case for case, kind in kinds.items() if kind is AsyncCheckpointIO} == {("gpu", 1), ("mps", 1)}
