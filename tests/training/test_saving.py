"""When checkpoints are written, and that each of them leads to the same bits; which one is the best."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import BATCHES, Rows, classifier, fitted, same, shapes_data, weights

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import Clock, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import (
    best_checkpoint,
    last_checkpoint,
    latest_valid_checkpoint,
    read_checkpoint,
    regular_checkpoint,
)

pytestmark = pytest.mark.usefixtures("dropout_net")


@pytest.mark.parametrize(
    ("interval", "steps", "seconds"),
    [("500", 500, 0), (500, 500, 0), ("10m", 0, 600), ("90s", 0, 90), ("1.5h", 0, 5400), ("0.5m", 0, 30), ("500.0", 500, 0)],
)
def test_an_interval_is_steps_or_a_time(interval: str | int, steps: int, seconds: float) -> None:
    callback = regular_checkpoint(interval)
    assert callback._every_n_train_steps == steps
    assert (callback._train_time_interval.total_seconds() if callback._train_time_interval else 0) == seconds


@pytest.mark.parametrize("interval", ["", "0", 0, "0m", "-3", -3, "1.5", "m", "10 m", "10d", "often", "1e3", "10M"])
def test_anything_else_is_refused_with_examples(interval: str | int) -> None:
    with pytest.raises(UsageError, match=r"--checkpoint-every is a number of steps \(500\) or a time \(10m, 90s, 1h\), not"):
        regular_checkpoint(interval)


class Saves(Callback):
    """Notes the steps at which something was saved; fails at the start of step `end`."""

    def __init__(self, end: int = -1) -> None:
        self.steps: list[int] = []
        self._end = end

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._end:
            raise RuntimeError("pulled the plug")


class Passes(Callback):
    """Lets 25 s pass in each batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.now += 25.0


def run(folder: Path, every: str | None, *more: Callback, resume: Path | None = None, **settings: Any) -> tuple[Any, Rows]:
    """Trains two epochs with all callbacks of a run; returns the weights at the end, and the curves."""
    rows, best, last = Rows(), best_checkpoint(), last_checkpoint()
    regular = [regular_checkpoint(every)] if every else []
    for callback in (best, last, *regular):
        callback.dirpath = str(folder)
    model = classifier(net="dropout", momentum=0.9, ema_decay=0.9, schedule="one_cycle")
    callbacks = [*more, Clock(), RandomState(), best, last, *regular, OrderlyStop(last)]
    options = {"logger": rows, "log_every_n_steps": 2, "max_epochs": 2, "enable_checkpointing": True, **settings}
    try:
        fitted(model, shapes_data(crop=2, flip="random"), *callbacks, resume=resume, **options)
    except RuntimeError as error:
        error.rows = rows.rows  # type: ignore[attr-defined]
        raise
    return weights(model), rows


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"),
    [("3", 1, [3, 6, 7, 9, 12, 14]), ("60s", 1, [3, 6, 7, 9, 12, 14]), ("60s", 2, [2, 4, 5, 7, 8])],
)
def test_checkpoints_within_epochs_are_saved_between_updates_and_change_nothing(
    every: str, accumulate: int, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two accumulated batches, the second one ends an update; where time is up after the first, it is waited for."""
    expected, curves = run(tmp_path / "without", None, accumulate_grad_batches=accumulate)
    saves = Saves()
    end, same_curves = run(tmp_path / "with", every, saves, Passes(monkeypatch), accumulate_grad_batches=accumulate)
    assert sorted(set(saves.steps)) == steps
    assert all(saves.steps.count(step) == 1 for step in steps if step % (BATCHES // accumulate + accumulate - 1))
    assert same(end, expected)
    assert same_curves.rows == curves.rows


@pytest.mark.parametrize(("end", "accumulate", "reached"), [(4, 1, 3), (6, 1, 6), (8, 1, 7), (12, 1, 12), (6, 2, 6)])
def test_a_run_that_died_goes_on_from_within_its_epoch_as_if_it_had_not(
    tmp_path: Path, end: int, accumulate: int, reached: int, recwarn: pytest.WarningsRecorder
) -> None:
    expected, curves = run(tmp_path / "whole", None, accumulate_grad_batches=accumulate)
    with pytest.raises(RuntimeError, match="plug") as died:
        run(tmp_path / "parts", "3", Saves(end), accumulate_grad_batches=accumulate)
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["global_step"] == reached
    torch.manual_seed(99)
    resume = tmp_path / "parts" / "last.ckpt"
    result, rest = run(tmp_path / "parts", "5", resume=resume, accumulate_grad_batches=accumulate)  # another interval will do
    assert same(result, expected)
    before = [row for row in died.value.rows if row[0] <= reached]  # type: ignore[attr-defined]
    assert [*before, *rest.rows] == curves.rows
    assert not [warning for warning in recwarn if "callbacks used to create the checkpoint" in str(warning.message)]


@pytest.mark.parametrize("gone", [["last.ckpt"], ["last.ckpt", "previous.ckpt"]])
def test_the_checkpoint_before_a_damaged_one_leads_to_the_same_bits(tmp_path: Path, gone: list[str]) -> None:
    expected, curves = run(tmp_path / "whole", None)
    with pytest.raises(RuntimeError, match="plug"):
        run(tmp_path / "parts", "3", Saves(11))
    for name in gone:
        (tmp_path / "parts" / name).write_bytes((tmp_path / "parts" / name).read_bytes()[:-100])
    chosen = latest_valid_checkpoint(tmp_path / "parts" / "last.ckpt")
    assert chosen.path.name == ("previous.ckpt" if len(gone) == 1 else "best.ckpt")
    assert chosen.damaged is not None and "last.ckpt is cut short or damaged" in chosen.damaged
    torch.manual_seed(99)
    result, rest = run(tmp_path / "parts", "3", resume=chosen.path)
    assert same(result, expected)
    assert rest.rows == [row for row in curves.rows if row[0] > BATCHES]


def test_the_best_is_of_the_epoch_with_the_highest_accuracy_and_is_known_after_a_move(tmp_path: Path) -> None:
    scores, before, after = {}, tmp_path / "before", tmp_path / "after"
    model = classifier(net="shapenet", lr=0.3, momentum=0.9)
    after_validation = model.on_validation_epoch_end

    def noted() -> None:
        after_validation()
        assert model.score is not None
        scores[model.current_epoch] = (model.score.accuracy, weights(model))

    model.on_validation_epoch_end = noted  # type: ignore[method-assign]
    best, last = best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(before)
    fitted(model, shapes_data(), best, last, enable_checkpointing=True, max_epochs=5)
    assert sorted(file.name for file in before.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    winner = max(scores, key=lambda epoch: (scores[epoch][0], -epoch))
    assert len({accuracy for accuracy, _ in scores.values()}) > 1
    kept, final = read_checkpoint(before / "best.ckpt"), read_checkpoint(before / "last.ckpt")
    assert (kept["epoch"], final["epoch"], read_checkpoint(before / "previous.ckpt")["epoch"]) == (winner, 4, 3)
    assert same(kept["state_dict"], scores[winner][1]) and same(final["state_dict"], weights(model))
    assert kept["cifar_lit"]["score"]["accuracy"] == scores[winner][0]

    before.rename(after)
    best, last = best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(after)
    again = classifier(net="shapenet", lr=1e-9, momentum=0.9)  # gets no better
    fitted(again, shapes_data(), best, last, enable_checkpointing=True, max_epochs=6, resume=after / "last.ckpt")
    assert best.best_model_path == str(after / "best.ckpt")
    assert list(best.best_k_models) == [str(after / "best.ckpt")]
    assert best.current_score is not None and not before.exists()
    assert sorted(file.name for file in after.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
