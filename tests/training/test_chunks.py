"""Batches that are handed over several at a time train, count and log as they do one by one."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback, LearningRateMonitor, ModelCheckpoint, Timer
from small_runs import Rows, classifier, fitted, same, shapes_data, trainer, weights

from cifar_lit.training.callbacks import Clock, EpochLines, LiveBar, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")

BATCHES = 7  # of an epoch: six of 16 images and one of 4
BATCH_SIZES = [16] * 6 + [4]


class Means(Callback):
    """Notes each epoch's means."""

    def __init__(self) -> None:
        self.epochs: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(pl_module.epoch_means())  # type: ignore[operator]


class Calls(Callback):
    """Counts how often a batch is said to have ended, and how many images it had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sizes.append(len(batch.labels))


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "momentum, logged every 3 steps": ({"momentum": 0.9}, {"log_every_n_steps": 3}),
    "logged every 5 steps, a schedule by the step": ({"schedule": "one_cycle", "momentum": 0.9}, {"log_every_n_steps": 5}),
    "logged once an epoch, a schedule by the epoch": (
        {"schedule": "cosine", "schedule_every": "epoch", "optimizer": "adamw", "lr": 0.01},
        {"log_every_n_steps": 50},
    ),
    "every step logged, Nesterov, dropout": (
        {"net": "dropout", "momentum": 0.9, "nesterov": True, "label_smoothing": 0.1},
        {"log_every_n_steps": 1},
    ),
    "bfloat16": ({"momentum": 0.9}, {"precision": "bf16-mixed", "log_every_n_steps": 4}),
    "clipped and accumulated": (
        {"schedule": "triangular"},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3, "log_every_n_steps": 2},
    ),
}


def outcome(chunk: int, model_settings: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, ...]:
    """The weights at the end, and all that was counted on the way there."""
    rows, means, clock, model = Rows(), Means(), Clock(), classifier(**model_settings)
    data = shapes_data(crop=2, flip="random", chunk=chunk)
    done = fitted(model, data, means, clock, logger=rows, max_epochs=3, **settings)
    loader: Any = done.train_dataloader
    assert loader.chunk == (chunk or 32)
    return weights(model), rows.rows, means.epochs, done.global_step, clock.images


@pytest.mark.parametrize("name", SETTINGS)
def test_trainings_by_one_three_four_or_all_batches_at_a_time_are_the_same_bit_for_bit(name: str) -> None:
    single, rows, means, steps, images = outcome(1, *SETTINGS[name])
    assert len(means) == 3 and len(rows) >= 6
    assert (steps, images) == (9 if name.startswith("clipped") else 3 * BATCHES, 300)
    for chunk in (3, 4, 0):
        found, *counted = outcome(chunk, *SETTINGS[name])
        assert same(found, single), chunk
        assert counted == [rows, means, steps, images], chunk


def chunk_of(done: pl.Trainer) -> int:
    """How many batches at a time the loader of a fit hands over."""
    loader: Any = done.train_dataloader
    return int(loader.chunk)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 10, "max_epochs": -1}, 10),
        ({"max_steps": 10, "max_epochs": 20}, 10),
        ({"limit_train_batches": 3}, 6),
        ({"limit_train_batches": 1}, 2),
        ({"limit_train_batches": 0.5}, 6),
        ({"fast_dev_run": 2}, 2),
        ({"fast_dev_run": True}, 1),
        ({"overfit_batches": 2}, 4),
    ],
)
def test_limits_of_steps_and_batches_count_batches(settings: dict[str, Any], steps: int) -> None:
    calls = Calls()
    done = fitted(classifier(), shapes_data(), calls, **settings)
    assert done.global_step == steps
    assert len(calls.sizes) == steps
    without = fitted(classifier(), shapes_data(), **settings)
    assert (without.global_step, chunk_of(without)) == (steps, 1)


@pytest.mark.parametrize("interval", [3, 0.5])
def test_validation_within_an_epoch_comes_after_that_many_batches(interval: Any) -> None:
    rows = Rows()
    done = fitted(classifier(), shapes_data(), logger=rows, val_check_interval=interval)
    assert sorted(rows.of("val/loss")) == [3, 6, 10, 13]
    assert chunk_of(done) == 1


def test_validation_after_so_many_batches_of_all_epochs_counts_batches() -> None:
    rows = Rows()
    fitted(classifier(), shapes_data(), logger=rows, val_check_interval=5, check_val_every_n_epoch=None)
    assert sorted(rows.of("val/loss")) == [5, 10]


def test_checkpoints_every_few_steps_are_written_at_these_steps(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(str(tmp_path), filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fitted(classifier(), shapes_data(), checkpoints, enable_checkpointing=True)
    steps = {path.name: read_checkpoint(path)["global_step"] for path in tmp_path.iterdir()}
    assert steps == {f"step={step}.ckpt": step for step in (4, 8, 12)}


def test_a_users_callback_is_called_for_every_batch() -> None:
    calls, started = Calls(), []
    done = fitted(classifier(), shapes_data(), calls)
    assert calls.sizes == 2 * BATCH_SIZES
    assert chunk_of(done) == 1
    function = LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: started.append(index))
    fitted(classifier(), shapes_data(), function)
    assert started == 2 * list(range(BATCHES))


@pytest.mark.parametrize("callback", [Timer(duration={"hours": 1}), LearningRateMonitor("step")])
def test_lightnings_callbacks_that_act_at_each_batch_get_each_batch(callback: Callback) -> None:
    assert chunk_of(fitted(classifier(), shapes_data(), callback, logger=Rows())) == 1


def test_an_average_of_the_weights_takes_in_every_step() -> None:
    assert chunk_of(fitted(classifier(ema_decay=0.9), shapes_data())) == 1


def test_what_a_callback_keeps_of_a_steps_loss_stays_as_it_was() -> None:
    kept: list[Any] = []
    rows = Rows()
    keep = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: kept.append(outputs["loss"]))
    fitted(classifier(), shapes_data(), keep, logger=rows, max_epochs=1, log_every_n_steps=1)
    assert [float(loss) for loss in kept] == pytest.approx(list(rows.of("train/loss").values()), rel=1e-6)


def test_our_own_callbacks_let_several_batches_be_handed_over(tmp_path: Path) -> None:
    clock, best, last = Clock(), best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(tmp_path)
    ours = [clock, EpochLines(clock), LiveBar(), RandomState(), best, last, OrderlyStop(last)]
    done = fitted(classifier(), shapes_data(), *ours, enable_checkpointing=True, enable_progress_bar=True)
    assert chunk_of(done) == 32
    assert done.global_step == read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2 * BATCHES
    assert clock.images == 200


def test_a_small_batch_is_handed_over_with_more_others_than_a_large_one() -> None:
    for batch_size, chunk in ((1, 512), (8, 64), (100, 5), (300, 1), (1000, 1)):
        data = shapes_data(count=400, batch_size=batch_size)
        data.trainer = trainer()
        assert data.train_dataloader().chunk == chunk


@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_the_bar_goes_on_by_the_batches_that_were_trained_on(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int]] = []
    original = LiveBar._update

    def update(bar: Any, task: Any, current: int, *more: Any, **options: Any) -> None:
        original(bar, task, current, *more, **options)
        if task is not None and task == bar.train_progress_bar_id:
            progress = bar.progress.tasks[task]
            shown.append((int(progress.completed), int(progress.total)))

    monkeypatch.setattr(LiveBar, "_update", update)
    fitted(classifier(), shapes_data(chunk=chunk), LiveBar(), enable_progress_bar=True)
    steps = {1: [1, 2, 3, 4, 5, 6, 7], 3: [3, 6, 7], 0: [7]}[chunk]
    assert shown == 2 * [(step, BATCHES) for step in steps]
