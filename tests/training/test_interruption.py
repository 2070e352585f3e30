"""A training that is stopped by a signal, or dies, goes on to the same bits from whichever checkpoint there is; which is best."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import BATCHES, At, Rows, best_and_last, classifier, fitted, pull_the_plug, same, shapes_data, weights
from torch import Tensor

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import Clock, Interrupted, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import latest_valid_checkpoint, read_checkpoint, regular_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")


@pytest.fixture(autouse=True)
def _signals_given_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in OrderlyStop.SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in OrderlyStop.SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


class Run(NamedTuple):
    """How a training ended."""

    weights: dict[str, Tensor]
    rows: list[tuple[int, dict[str, float]]]
    images: int
    best: dict[str, Any]


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "one cycle and an average": {"schedule": "one_cycle", "weight_decay": 1e-3, "nesterov": True, "ema_decay": 0.9},
    "adamw, by the epoch": {"optimizer": "adamw", "lr": 0.01, "schedule": "cosine", "schedule_every": "epoch"},
    "smaller images first": {"schedule": "triangular", "resolutions": {8: 0.4, 12: 0.3}},  # an epoch each
}
AVERAGED = "one cycle and an average"


def run(
    folder: Path,
    settings: dict[str, Any],
    *more: Callback,
    every: str | None = None,
    resume: Path | None = None,
    logger: Rows | None = None,
    accumulate: int = 1,
) -> Run:
    """Trains three epochs with all callbacks of a run."""
    rows, clock, (best, last) = logger or Rows(), Clock(), best_and_last(folder)
    regular = [regular_checkpoint(every)] if every else []
    for callback in regular:
        callback.dirpath = str(folder)
    model_settings = {name: value for name, value in settings.items() if name != "resolutions"}
    model = classifier(**{"net": "dropout", "momentum": 0.9, **model_settings})
    data = shapes_data(crop=2, flip="random", resolutions=settings.get("resolutions", {}))
    options: dict[str, Any] = {"log_every_n_steps": 2, "accumulate_grad_batches": accumulate, "enable_checkpointing": True}
    callbacks = [*more, clock, RandomState(), best, last, *regular, OrderlyStop(last)]
    fitted(model, data, *callbacks, resume=resume, logger=rows, max_epochs=3, **options)
    return Run(weights(model), rows.rows, clock.images, read_checkpoint(folder / "best.ckpt"))


Undisturbed = Callable[..., Run]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The whole training of some settings, made once."""
    runs: dict[tuple[str, int], Run] = {}

    def whole(name: str, accumulate: int = 1) -> Run:
        if (name, accumulate) not in runs:
            runs[name, accumulate] = run(tmp_path_factory.mktemp("whole"), SETTINGS[name], accumulate=accumulate)
        return runs[name, accumulate]

    return whole


def stopped(
    folder: Path, name: str, press: Callback, error: type[BaseException] = Interrupted, **options: Any
) -> tuple[Any, Any]:
    """What ended a training, and its curves up to there."""
    rows = Rows()
    with pytest.raises(error) as ended:
        run(folder, SETTINGS[name], press, logger=rows, **options)
    torch.manual_seed(99)  # another process would not have this state either
    return ended.value, rows.rows


def assert_goes_on(checkpoint: Path, name: str, rows: list[Any] | None, expected: Run, **options: Any) -> None:
    """Resumes to the same weights, curves and best checkpoint as if nothing had been; rows: of before, if they are known."""
    reached = read_checkpoint(checkpoint)["global_step"]
    resumed = run(checkpoint.parent, SETTINGS[name], resume=checkpoint, **options)
    assert same(resumed.weights, expected.weights)
    before = [row for row in expected.rows if row[0] <= reached] if rows is None else rows
    assert [*before, *resumed.rows] == expected.rows
    assert resumed.images == expected.images == 300
    assert resumed.best["epoch"] == expected.best["epoch"]
    assert same(resumed.best["state_dict"], expected.best["state_dict"])


# ---- signals


def press(*numbers: int) -> Callable[..., None]:
    return lambda *_: [os.kill(os.getpid(), number) for number in numbers]


class PressInValidation(Callback):
    """Sends SIGTERM while the validation of an epoch runs."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            press(signal.SIGTERM)()


@pytest.mark.parametrize(
    ("name", "step"),
    [("sgd", 1), (AVERAGED, 9), (AVERAGED, 20), ("adamw, by the epoch", 6), *(("smaller images first", step) for step in (6, 9))],
)
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_as_if_it_had_not_been(
    tmp_path: Path, name: str, step: int, undisturbed: Undisturbed
) -> None:
    expected = undisturbed(name)
    interruption, rows = stopped(tmp_path, name, At(step, press(signal.SIGINT)))
    assert (str(interruption), interruption.exit_code) == ("SIGINT", 130)
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (step, step // BATCHES)
    assert_goes_on(tmp_path / "last.ckpt", name, rows, expected)


@pytest.mark.parametrize(
    ("callback", "step"),
    [(PressInValidation(0), 7), (PressInValidation(2), 21), *((At(step, press(signal.SIGTERM)), step) for step in (14, 21))],
)
def test_a_signal_in_an_epochs_last_step_or_validation_ends_the_epoch_first(
    tmp_path: Path, callback: Callback, step: int, undisturbed: Undisturbed
) -> None:
    interruption, rows = stopped(tmp_path, "sgd", callback)
    assert interruption.exit_code == 143
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == step
    assert_goes_on(tmp_path / "last.ckpt", "sgd", rows, undisturbed("sgd"))


def test_a_second_signal_stops_at_once_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(tmp_path, "sgd", At(2, press(signal.SIGINT, signal.SIGINT)))
    assert not (tmp_path / "last.ckpt").exists()
    assert capsys.readouterr().err.count("once more to stop at once") == 1


def test_a_resumed_run_uses_the_rate_that_is_given_but_cannot_change_its_optimizer_or_net(tmp_path: Path) -> None:
    stopped(tmp_path, "sgd", At(9, press(signal.SIGINT)))
    last = tmp_path / "last.ckpt"
    for settings, line in (
        ({"optimizer": "adamw", "lr": 0.01}, "was trained with sgd"),
        ({"net": "lenet"}, "this run's net is dropout, not lenet"),
        ({"num_classes": 12}, "this run's num_classes is 10, not 12"),
    ):
        with pytest.raises(UsageError, match=line):
            run(tmp_path, settings, resume=last)
    rates = [values["lr"] for _, values in run(tmp_path, {"lr": 0.002}, resume=last).rows if "lr" in values]
    assert rates == pytest.approx([0.002] * len(rates)) and rates


# ---- checkpoints within epochs


@pytest.mark.parametrize(
    ("interval", "steps", "seconds"),
    [("500", 500, 0), (500, 500, 0), ("10m", 0, 600), ("90s", 0, 90), ("1.5h", 0, 5400), ("500.0", 500, 0)],
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
    """Notes the steps at which something was saved, and lets 25 s pass in each batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.now += 25.0


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"),
    [("3", 1, [3, 6, 7, 9, 12, 14]), ("60s", 1, [3, 6, 7, 9, 12, 14]), ("60s", 2, [2, 4, 5, 7, 8])],
)
def test_checkpoints_within_epochs_are_saved_between_updates_and_change_nothing(
    every: str, accumulate: int, steps: list[int], tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two accumulated batches, the second one ends an update; where time is up after the first, it is waited for."""
    expected, saves = undisturbed(AVERAGED, accumulate), Saves(monkeypatch)
    result = run(tmp_path, SETTINGS[AVERAGED], saves, every=every, accumulate=accumulate)
    assert sorted({step for step in saves.steps if step <= steps[-1]}) == steps  # in the first two epochs
    assert all(saves.steps.count(step) == 1 for step in steps if step % (BATCHES // accumulate + accumulate - 1))
    assert same(result.weights, expected.weights) and result.rows == expected.rows


@pytest.mark.parametrize(
    ("end", "accumulate", "every", "reached"),
    [(5, 1, "3", 3), (7, 1, "3", 6), (9, 1, "3", 7), (7, 2, "3", 6), (11, 1, None, 7)],
)
def test_a_run_that_died_goes_on_from_its_last_checkpoint_as_if_it_had_not(
    tmp_path: Path,
    end: int,
    accumulate: int,
    every: str | None,
    reached: int,
    undisturbed: Undisturbed,
    recwarn: pytest.WarningsRecorder,
) -> None:
    _, rows = stopped(tmp_path, AVERAGED, At(end, pull_the_plug), RuntimeError, every=every, accumulate=accumulate)
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == reached
    before = [row for row in rows if row[0] <= reached]
    expected = undisturbed(AVERAGED, accumulate)  # and another interval will do
    assert_goes_on(tmp_path / "last.ckpt", AVERAGED, before, expected, every=every and "5", accumulate=accumulate)
    assert not [warning for warning in recwarn if "callbacks used to create the checkpoint" in str(warning.message)]


@pytest.mark.parametrize("gone", [["last.ckpt"], ["last.ckpt", "previous.ckpt"]])
def test_the_checkpoint_before_a_damaged_one_leads_to_the_same_bits(
    tmp_path: Path, gone: list[str], undisturbed: Undisturbed
) -> None:
    stopped(tmp_path, AVERAGED, At(12, pull_the_plug), RuntimeError, every="3")
    for name in gone:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    chosen = latest_valid_checkpoint(tmp_path / "last.ckpt")
    assert chosen.path.name == ("previous.ckpt" if len(gone) == 1 else "best.ckpt")
    assert chosen.damaged is not None and "last.ckpt is cut short or damaged" in chosen.damaged
    assert_goes_on(chosen.path, AVERAGED, None, undisturbed(AVERAGED), every="3")


def test_the_best_is_of_the_epoch_with_the_highest_accuracy_and_is_known_after_a_move(tmp_path: Path) -> None:
    scores, before, after = {}, tmp_path / "before", tmp_path / "after"
    model = classifier(net="shapenet", lr=0.3, momentum=0.9)
    after_validation = model.on_validation_epoch_end

    def noted() -> None:
        after_validation()
        assert model.score is not None
        scores[model.current_epoch] = (model.score.accuracy, weights(model))

    model.on_validation_epoch_end = noted  # type: ignore[method-assign]
    fitted(model, shapes_data(), *best_and_last(before), enable_checkpointing=True, max_epochs=5)
    assert sorted(file.name for file in before.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    winner = max(scores, key=lambda epoch: (scores[epoch][0], -epoch))
    assert len({accuracy for accuracy, _ in scores.values()}) > 1
    kept, final = read_checkpoint(before / "best.ckpt"), read_checkpoint(before / "last.ckpt")
    assert (kept["epoch"], final["epoch"], read_checkpoint(before / "previous.ckpt")["epoch"]) == (winner, 4, 3)
    assert same(kept["state_dict"], scores[winner][1]) and same(final["state_dict"], weights(model))
    assert kept["cifar_lit"]["score"]["accuracy"] == scores[winner][0]

    before.rename(after)
    best, last = best_and_last(after)
    again = classifier(net="shapenet", lr=1e-9, momentum=0.9)  # gets no better
    fitted(again, shapes_data(), best, last, enable_checkpointing=True, max_epochs=6, resume=after / "last.ckpt")
    assert best.best_model_path == str(after / "best.ckpt")
    assert list(best.best_k_models) == [str(after / "best.ckpt")]
    assert best.current_score is not None and not before.exists()
    assert sorted(file.name for file in after.iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
