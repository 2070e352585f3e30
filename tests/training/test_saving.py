import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Rows, classifier, fitted, same, shapes_data, weights

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import Clock, Interval, OrderlyStop, RandomState, RegularCheckpoint, parse_interval
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, latest_valid_checkpoint, read_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")

STEPS = 7  # an epoch


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("500", 500, 0), (500, 500, 0), ("10m", 0, 600), ("90s", 0, 90), ("1.5h", 0, 5400), ("0.5m", 0, 30), ("500.0", 500, 0)],
)
def test_an_interval_is_steps_or_a_time(text: str | int, steps: int, seconds: float) -> None:
    assert parse_interval(text) == Interval(steps, seconds)


@pytest.mark.parametrize("text", ["", "0", 0, "0m", "-3", -3, "1.5", "m", "10 m", "10d", "often", "1e3", "10M"])
def test_anything_else_is_refused_with_examples(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"--checkpoint-every is a number of steps \(500\) or a time \(10m, 90s, 1h\), not"):
        parse_interval(text)


class Saves(Callback):
    """Notes the steps at which something was saved; breaks off after as many as asked for."""

    def __init__(self, breaks_off_at: int = -1) -> None:
        self.steps: list[int] = []
        self._end = breaks_off_at

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._end:
            raise RuntimeError("pulled the plug")


def run(folder: Path, every: Interval | None, *more: Callback, resume: Path | None = None, **settings: Any) -> tuple[Any, Rows]:
    """Trains two epochs with all callbacks of a run; returns the weights at the end, and the curves."""
    rows, best, last = Rows(), best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(folder)
    model = classifier(net="dropout", momentum=0.9, ema_decay=0.9, schedule="one_cycle")
    regular = [RegularCheckpoint(every, last)] if every else []
    callbacks = [*more, Clock(), RandomState(), best, last, *regular, OrderlyStop(last)]
    options = {"logger": rows, "log_every_n_steps": 2, "max_epochs": 2, "enable_checkpointing": True, **settings}
    try:
        fitted(model, shapes_data(crop=2, flip="random"), *callbacks, resume=resume, **options)
    except RuntimeError as error:
        error.rows = rows.rows  # type: ignore[attr-defined]
        raise
    return weights(model), rows


def test_steps_are_counted_from_the_last_checkpoint_and_epoch_ends_are_not_saved_twice(tmp_path: Path) -> None:
    saves = Saves()
    run(tmp_path, Interval(steps=3), saves)
    best_of_first, best_of_second = saves.steps.count(STEPS), saves.steps.count(2 * STEPS)
    assert sorted(set(saves.steps)) == [3, 6, STEPS, 10, 13, 2 * STEPS]
    assert best_of_first == 2  # best and last
    assert best_of_second in (1, 2)


def test_a_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Passes(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
            now[0] += 25.0

    saves = Saves()
    run(tmp_path, Interval(seconds=60.0), saves, Passes())
    assert sorted(set(saves.steps)) == [3, 6, STEPS, 10, 13, 2 * STEPS]


def test_checkpoints_on_the_way_change_nothing(tmp_path: Path) -> None:
    expected, curves = run(tmp_path / "without", None)
    found, same_curves = run(tmp_path / "with", Interval(steps=1))
    assert same(found, expected)
    assert same_curves.rows == curves.rows


@pytest.mark.parametrize("end", [4, 6, 8, 12])
def test_a_run_that_died_goes_on_from_within_its_epoch_as_if_it_had_not(tmp_path: Path, end: int) -> None:
    expected, curves = run(tmp_path / "whole", None)
    with pytest.raises(RuntimeError, match="plug") as died:
        run(tmp_path / "parts", Interval(steps=3), Saves(breaks_off_at=end))
    reached = read_checkpoint(tmp_path / "parts" / "last.ckpt")["global_step"]
    assert reached == max(step for step in (3, 6, 7, 10) if step <= end)
    torch.manual_seed(99)
    found, rest = run(tmp_path / "parts", Interval(steps=3), resume=tmp_path / "parts" / "last.ckpt")
    assert same(found, expected)
    before = [row for row in died.value.rows if row[0] <= reached]  # type: ignore[attr-defined]
    assert [*before, *rest.rows] == curves.rows


@pytest.mark.parametrize("gone", [["last.ckpt"], ["last.ckpt", "previous.ckpt"]])
def test_the_checkpoint_before_a_damaged_one_leads_to_the_same_bits(tmp_path: Path, gone: list[str]) -> None:
    expected, curves = run(tmp_path / "whole", None)
    with pytest.raises(RuntimeError, match="plug"):
        run(tmp_path / "parts", Interval(steps=3), Saves(breaks_off_at=11))
    for name in gone:
        (tmp_path / "parts" / name).write_bytes((tmp_path / "parts" / name).read_bytes()[:-100])
    chosen = latest_valid_checkpoint(tmp_path / "parts" / "last.ckpt")
    assert chosen.path.name == ("previous.ckpt" if len(gone) == 1 else "best.ckpt")
    assert chosen.damaged is not None and "last.ckpt is cut short or damaged (its end is missing)" in chosen.damaged
    torch.manual_seed(99)
    found, rest = run(tmp_path / "parts", Interval(steps=3), resume=chosen.path)
    assert same(found, expected)
    assert rest.rows == [row for row in curves.rows if row[0] > STEPS]
