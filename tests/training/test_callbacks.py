"""Times, random states, the line of each epoch, and values that are not finite."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import (
    BATCHES,
    MOMENTUM,
    At,
    Rows,
    best_and_last,
    classifier,
    fitted,
    shapes_data,
)

from cifar_lit.data.image_set import Batch
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.training import callbacks
from cifar_lit.training.callbacks import Clock, EpochLines, RandomState
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.rows import NotFiniteLoss
from cifar_lit.training.score import Score

CPU = torch.device("cpu")


def batch(count: int, loss_weight: float = 1.0) -> Batch:
    return Batch(torch.zeros(count, 3, 2, 2), torch.zeros(count).long(), torch.zeros(count).long(), loss_weight)


def test_the_clock_separates_training_from_validation_and_continues_on_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now.seconds)
    fit, model = SimpleNamespace(world_size=1, current_epoch=0, max_epochs=1), SimpleNamespace(device=CPU)
    saved = dict[str, Any]()
    for epochs in (1, 2):  # the second epoch in a resumed run
        clock: Any = Clock()
        if saved:
            clock.load_state_dict(saved)
        now.seconds += 5  # set-up
        clock.on_train_start(fit, None)
        now.seconds += 10
        clock.on_train_batch_end(fit, None, None, batch(16), 0)
        clock.on_validation_start(fit, None)
        now.seconds += 3
        clock.on_validation_end(fit, None)
        saved = clock.state_dict()
        clock.on_train_epoch_end(fit, model)
        now.seconds += 50  # the checkpoint
        clock.on_train_end(fit, None)
        now.seconds += 100  # the test
        assert (clock.seconds, clock.training_seconds, clock.images) == (13 * epochs, 10 * epochs, 16 * epochs)


def test_the_clock_includes_the_work_that_a_device_has_not_finished_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes while Python continues: one second for each batch, which passes when somebody waits for it."""
    clock, now, waits = Clock(), SimpleNamespace(seconds=0.0, queued=0), list[int]()

    def wait(_: Any) -> None:
        waits.append(now.queued)
        now.seconds, now.queued = now.seconds + now.queued, 0

    def enqueue(*_: Any) -> None:
        now.queued += 1

    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now.seconds)
    monkeypatch.setattr(callbacks, "wait_for_device", wait)
    work = LambdaCallback(on_train_batch_end=enqueue, on_test_batch_end=enqueue)
    model, data = classifier(), shapes_data(eval_batch_size=12)
    done = fitted(model, data, work, clock, max_epochs=2, limit_val_batches=0)
    assert clock.seconds == done.global_step == 2 * BATCHES
    assert waits == [2 * BATCHES]  # a wait in each epoch would cost time
    now.queued = 5  # the copy of the weights
    done.test(model, datamodule=data, verbose=False)
    assert clock.test_seconds == 2  # batches


@pytest.mark.parametrize(("parts", "total"), [((4, 4), 8), ((3, 2), 5), ((34, 33, 33), 100)])
def test_every_device_counts_the_global_batch_and_skips_an_empty_part(parts: tuple[int, ...], total: int) -> None:
    fit: Any = SimpleNamespace(world_size=len(parts))
    for part in parts:
        clock: Any = Clock()
        clock.on_train_batch_end(fit, None, None, batch(part, part * len(parts) / total), 0)
        clock.on_train_batch_end(fit, None, None, batch(2, 0.0), 0)
        assert clock.images == total


class Pair:
    """The first of two devices. The other one was seeded with 5."""

    world_size, global_rank = 2, 0

    @property
    def strategy(self) -> "Pair":
        return self

    def reduce(self, rows: torch.Tensor, reduce_op: str) -> torch.Tensor:
        rows[1] = torch.Generator().manual_seed(5).get_state()
        return rows


def test_each_device_restores_its_own_random_state() -> None:
    pair, checkpoint = Pair(), dict[str, Any]()
    model, restored = SimpleNamespace(device=torch.device("cpu")), RandomState()
    RandomState().on_save_checkpoint(pair, model, checkpoint)
    expected = [torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5))]
    for rank in (0, 1):
        pair.global_rank = rank
        restored.on_load_checkpoint(pair, model, checkpoint)
        torch.manual_seed(99)
        restored.on_train_start(pair, model)
        assert torch.equal(torch.rand(3), expected[rank])


def test_each_epoch_prints_one_line_with_its_validation(capsys: pytest.CaptureFixture[str]) -> None:
    model, clock, losses = classifier(), Clock(), list[float]()
    note = LambdaCallback(on_train_epoch_end=lambda _, model: losses.extend(model.rows.epoch_means().values()))
    fitted(model, shapes_data(), clock, EpochLines(clock), note, max_epochs=3, check_val_every_n_epoch=2)
    first, second, third = (line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch "))
    assert re.fullmatch(r"epoch 1/3 · train loss {:.4f} acc {:.4f} · \d+\.\d s".format(*losses[:2]), first)
    assert model.score is not None
    validated = f"val loss {model.score.loss:.4f} acc {model.score.accuracy:.4f}"
    assert second.startswith("epoch 2/3 · train loss {:.4f} acc {:.4f} · ".format(*losses[2:4]) + validated)
    assert third.startswith("epoch 3/3 ·") and "val" not in third


# ---- losses and weights that are not finite


def test_an_infinite_loss_ends_the_training() -> None:
    """The loss of a class with probability 0 is infinite, not NaN, and the weights stay finite."""
    model: Any = classifier()
    model.net[-1].bias.data[1:] = -3e38
    with pytest.raises(NotFiniteLoss, match=r"^the loss is inf at step 0 of epoch 0$"):
        fitted(model, shapes_data())


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_detect_anomaly_names_the_operation_instead_of_the_loss() -> None:
    model: Any = classifier()
    model.net[-1].bias.data.fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"'LogSoftmaxBackward0' returned nan values"):
        fitted(model, shapes_data(), detect_anomaly=True)


# Tensors that may overflow in the last update of an epoch, after a finite loss.
OVERFLOWS: dict[str, Callable[[pl.Trainer, Any], torch.Tensor]] = {
    "weights": lambda _, model: next(model.net.parameters()).data,
    "a norm's statistics": lambda _, model: model.get_buffer("net.0.1.running_var"),
    "momenta": lambda trainer, _: next(iter(trainer.optimizers[0].state.values()))["momentum_buffer"],
    "the average": lambda trainer, _: next(average_of(trainer).parameters()).data,
}


def average_of(trainer: pl.Trainer) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, WeightAverage))._average_model  # type: ignore[attr-defined]


@pytest.mark.usefixtures("dropout_net")
@pytest.mark.parametrize(
    ("name", "averages", "validates"), [("weights", False, False), *((name, True, True) for name in OVERFLOWS)]
)
def test_an_overflow_reaches_no_checkpoint(tmp_path: Path, name: str, averages: bool, validates: bool) -> None:
    best, last = best_and_last(tmp_path)
    last.MIN_INTERVAL = 0.0
    saves, limits = ([best, last], {}) if validates else ([last], {"limit_val_batches": 0})
    overflow = At(2 * BATCHES, lambda *fit: OVERFLOWS[name](*fit)[:1].fill_(math.inf), after=True)
    average = [WeightAverage(0.9)] if averages else []
    with pytest.raises(NotFiniteLoss, match=r"the weight .* is no longer finite at step 14 of epoch 1"):
        fitted(classifier(net="dropout", **MOMENTUM), shapes_data(), *average, overflow, *saves, **limits)
    for path in tmp_path.glob("*.ckpt"):
        checkpoint = read_checkpoint(path)
        assert checkpoint["epoch"] == 0
        states = (checkpoint["state_dict"], *checkpoint["optimizer_states"][0]["state"].values())
        assert all(tensor.isfinite().all() for state in states for tensor in state.values())
    assert (tmp_path / "last.ckpt").exists()


def test_a_non_finite_validation_loss_is_never_the_best(tmp_path: Path) -> None:
    model, rows = classifier(), Rows()
    overflown, usual = Score(0.9, math.nan, 20, [], []), Score(0.5, 1.0, 20, [], [])
    scores = iter([overflown, usual])
    model.evaluation.compute = lambda: next(scores)  # type: ignore[method-assign]
    done = fitted(model, shapes_data(), *best_and_last(tmp_path), logger=rows)
    assert read_checkpoint(tmp_path / "best.ckpt")["epoch"] == 1
    assert done.current_epoch == 2 and sorted(rows.curve("val/accuracy").values()) == [0.5, 0.9]
