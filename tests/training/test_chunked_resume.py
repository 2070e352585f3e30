"""Stopped in the middle of an epoch that is handed over several batches at a time, and resumed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from real_runs import MODULE, SETTINGS, final_weights, here, only_run, same_bits, stopped
from small_runs import Rows, classifier, fitted, same, shapes_data, weights

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import Clock, Interrupted, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")

BATCHES = 7  # of an epoch, of which there are three


class Press(Callback):
    """Sends this process a signal while the chunk is trained on in which a step falls."""

    takes_chunks = True

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        first: int = trainer.train_dataloader.position - len(batch.sizes)  # type: ignore[union-attr]
        if first < self._step - BATCHES * trainer.current_epoch <= first + len(batch.sizes):
            os.kill(os.getpid(), signal.SIGINT)


class Single(Callback):
    """Wants to see every batch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pass


Run = Callable[..., tuple[dict[str, Any], list[Any], int]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Trains three epochs with all callbacks of a run; returns weights, log rows and images at the end."""

    def run(
        *more: Callback,
        folder: str = "parts",
        resume: bool = False,
        data: dict[str, Any],
        model: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        rows, clock, best, last = Rows(), Clock(), best_checkpoint(), last_checkpoint()
        best.dirpath = last.dirpath = str(tmp_path / folder)
        classes = classifier(**{"net": "dropout", "momentum": 0.9, "schedule": "one_cycle", **(model or {})})
        callbacks = [*more, clock, RandomState(), best, last, OrderlyStop(last)]
        path = tmp_path / folder / "last.ckpt" if resume else None
        options = {"logger": rows, "log_every_n_steps": 2, "max_epochs": 3, "enable_checkpointing": True, **settings}
        torch.manual_seed(99 if resume else 0)  # another process would not have the state of the first
        try:
            fitted(classes, shapes_data(crop=2, flip="random", **data), *callbacks, resume=path, **options)
        except Interrupted:
            return read_checkpoint(tmp_path / folder / "last.ckpt")["global_step"], rows.rows, clock.images
        return weights(classes), rows.rows, clock.images

    return run


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize(("step", "stopped_at"), [(1, 3), (3, 3), (5, 6), (9, 10), (13, 13), (18, 20)])
def test_a_run_stopped_between_the_chunks_of_an_epoch_goes_on_as_if_it_had_not_been(
    step: int, stopped_at: int, placement: str, run: Run
) -> None:
    expected, rows, images = run(folder="whole", data={"chunk": 3})
    data = {"chunk": 3, "placement": placement, "workers": 1}
    done, first, _ = run(Press(step), data=data)
    assert done == stopped_at
    found, rest, resumed_images = run(resume=True, data=data)
    assert same(found, expected)
    assert [*first, *rest] == rows
    assert resumed_images == images == 300


@pytest.mark.parametrize("schedule", ["constant", "one_cycle"])
@pytest.mark.parametrize("step", [2, 9])
def test_a_run_that_accumulates_is_stopped_between_two_updates(step: int, schedule: str, run: Run) -> None:
    settings: dict[str, Any] = {"data": {"chunk": 1}, "model": {"schedule": schedule}, "accumulate_grad_batches": 3}
    expected, rows, images = run(folder="whole", **settings)
    done, first, seen = run(Press(step), **settings)
    assert (done, seen) == {2: (1, 48), 9: (4, 148)}[step]
    found, rest, resumed_images = run(resume=True, **settings)
    assert same(found, expected)
    assert [*first, *rest] == rows
    assert resumed_images == images


@pytest.mark.parametrize("step", [1, 5])
def test_counting_by_one_from_the_middle_of_an_epoch_on_is_refused(step: int, run: Run) -> None:
    run(Press(step), data={"chunk": 3})
    line = r"in the middle of an epoch that counts 3 batches at a time: leave out what counts them singly .*, or resume from"
    for settings in ({"max_steps": 20}, {"limit_train_batches": 6}, {"val_check_interval": 3}):
        with pytest.raises(UsageError, match=line) as refused:
            run(resume=True, data={}, **settings)
    with pytest.raises(UsageError, match=line):
        run(Single(), resume=True, data={})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize(("before", "after"), [(3, 0), (3, 4), (3, 1), (1, 0), (1, 3)])
def test_an_epoch_goes_on_as_it_was_counted_before(before: int, after: int, step: int, run: Run) -> None:
    expected, rows, images = run(folder="whole", data={"chunk": before})
    _, first, _ = run(Press(step), data={"chunk": before})
    found, rest, resumed_images = run(resume=True, data={"chunk": after})
    assert same(found, expected)
    assert [*first, *rest] == rows
    assert resumed_images == images


def test_between_epochs_the_batches_may_be_counted_in_another_way(run: Run) -> None:
    expected, *_ = run(folder="whole", data={"chunk": 3})
    run(data={"chunk": 3}, max_epochs=1, model={"schedule": "constant"})
    straight, *_ = run(folder="other", data={"chunk": 1}, model={"schedule": "constant"})
    found, *_ = run(Single(), resume=True, data={}, model={"schedule": "constant"})
    assert same(found, straight)
    assert not same(found, expected)


@pytest.mark.parametrize("step", [1, 6])
def test_another_batch_size_is_refused_until_the_last_batch_of_an_epoch_is_done(step: int, run: Run) -> None:
    run(Press(step), data={"chunk": 1})
    with pytest.raises(UsageError, match="in the middle of an epoch of batches of 16: leave --batch-size at that"):
        run(resume=True, data={"chunk": 1, "batch_size": 8})


def test_ctrl_c_reaches_the_training_alone_where_workers_read_its_images(tmp_path: Path) -> None:
    words = [*SETTINGS, "--model.ema_decay", "0", "--data.placement", "host", "--data.chunk", "3", "--epochs", "2"]
    assert here(["train", *words], tmp_path / "whole").code == 0
    done = stopped([*MODULE, *words], tmp_path / "parts", 3, signal.SIGINT)
    assert done.code == 130, done.err
    assert done.err.count("stopping after this step") == 1
    assert "Traceback" not in done.err
    assert read_checkpoint(only_run(tmp_path / "parts") / "checkpoints" / "last.ckpt")["global_step"] == 6
    assert here(["train", "--resume"], tmp_path / "parts").code == 0
    assert same_bits(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))
