"""A training that is stopped by a signal, or dies, goes on to the same bits: weights, curves, best checkpoint."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import BATCHES, Rows, classifier, fitted, same, shapes_data, weights
from torch import Tensor

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import Clock, Interrupted, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")


@pytest.fixture(autouse=True)
def _signals_given_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in OrderlyStop.SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in OrderlyStop.SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


class Press(Callback):
    """Sends signals to this process: while a step runs, or while the validation of an epoch runs."""

    def __init__(self, step: int = -1, epoch: int = -1, number: int = signal.SIGINT, times: int = 1) -> None:
        self.step, self.epoch, self.number, self.times = step, epoch, number, times

    def _press(self) -> None:
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.step:
            self._press()

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            self._press()


class Run(NamedTuple):
    """How a training ended."""

    weights: dict[str, Tensor]
    rows: list[tuple[int, dict[str, float]]]
    images: int
    best: dict[str, Any]


DATA = ("resolutions",)
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "one cycle": {"schedule": "one_cycle", "weight_decay": 1e-3, "nesterov": True},
    "adamw, by the epoch": {"optimizer": "adamw", "lr": 0.01, "schedule": "cosine", "schedule_every": "epoch"},
    "average": {"ema_decay": 0.9},
    "smaller images first": {"schedule": "triangular", "resolutions": {8: 0.4, 12: 0.3}},  # an epoch each
}


def run(folder: Path, settings: dict[str, Any], *more: Callback, resume: bool = False, logger: Rows | None = None) -> Run:
    """Trains three epochs with all callbacks of a run."""
    rows, clock, best, last = logger or Rows(), Clock(), best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(folder)
    model_settings = {name: value for name, value in settings.items() if name not in DATA}
    model = classifier(**{"net": "dropout", "momentum": 0.9, **model_settings})
    data = shapes_data(crop=2, flip="random", **{name: settings[name] for name in DATA if name in settings})
    options = {"logger": rows, "log_every_n_steps": 2, "max_epochs": 3, "enable_checkpointing": True}
    callbacks = [*more, clock, RandomState(), best, last, OrderlyStop(last)]
    fitted(model, data, *callbacks, resume=folder / "last.ckpt" if resume else None, **options)
    return Run(weights(model), rows.rows, clock.images, read_checkpoint(folder / "best.ckpt"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The whole training of some settings, made once."""
    runs: dict[str, Run] = {}

    def whole(name: str) -> Run:
        if name not in runs:
            runs[name] = run(tmp_path_factory.mktemp("whole"), SETTINGS[name])
        return runs[name]

    return whole


def stopped(folder: Path, name: str, press: Callback, error: type[BaseException] = Interrupted) -> tuple[Any, list[Any]]:
    """What ended a training, and its curves up to there."""
    rows = Rows()
    with pytest.raises(error) as ended:
        run(folder, SETTINGS[name], press, logger=rows)
    torch.manual_seed(99)  # another process would not have this state either
    return ended.value, rows.rows


def assert_goes_on(folder: Path, name: str, rows: list[Any], expected: Run) -> None:
    """Resumes to the same weights, curves and best checkpoint as if nothing had been."""
    resumed = run(folder, SETTINGS[name], resume=True)
    assert same(resumed.weights, expected.weights)
    assert [*rows, *resumed.rows] == expected.rows
    assert resumed.images == expected.images == 300
    assert resumed.best["epoch"] == expected.best["epoch"]
    assert same(resumed.best["state_dict"], expected.best["state_dict"])


Undisturbed = Callable[[str], Run]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("step", [1, 6, 9, 20])
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_as_if_it_had_not_been(
    tmp_path: Path, name: str, step: int, undisturbed: Undisturbed
) -> None:
    expected = undisturbed(name)
    interruption, rows = stopped(tmp_path, name, Press(step=step))
    assert (str(interruption), interruption.exit_code) == ("SIGINT", 130)
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (step, step // BATCHES)
    assert_goes_on(tmp_path, name, rows, expected)


@pytest.mark.parametrize(
    ("press", "step"), [({"epoch": 0}, 7), ({"epoch": 1}, 14), ({"epoch": 2}, 21), ({"step": 14}, 14), ({"step": 21}, 21)]
)
def test_a_signal_in_an_epochs_last_step_or_validation_ends_the_epoch_first(
    tmp_path: Path, press: dict[str, int], step: int, undisturbed: Undisturbed
) -> None:
    expected = undisturbed("sgd")
    interruption, rows = stopped(tmp_path, "sgd", Press(**press, number=signal.SIGTERM))
    assert interruption.exit_code == 143
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == step
    assert_goes_on(tmp_path, "sgd", rows, expected)


def test_a_second_signal_stops_at_once_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped(tmp_path, "sgd", Press(step=2, times=2))
    assert not (tmp_path / "last.ckpt").exists()
    assert capsys.readouterr().err.count("once more to stop at once") == 1


def test_the_checkpoint_of_a_finished_epoch_resumes_exactly(tmp_path: Path, undisturbed: Undisturbed) -> None:
    class Crash(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == BATCHES + 3:
                raise RuntimeError("pulled the plug")

    _, rows = stopped(tmp_path, "one cycle", Crash(), RuntimeError)
    assert_goes_on(tmp_path, "one cycle", [row for row in rows if row[0] <= BATCHES], undisturbed("one cycle"))


def test_a_resumed_run_uses_the_rate_that_is_given_but_cannot_change_its_optimizer_or_net(tmp_path: Path) -> None:
    stopped(tmp_path, "sgd", Press(step=9))
    for settings, line in (
        ({"optimizer": "adamw", "lr": 0.01}, "was trained with sgd"),
        ({"net": "lenet"}, "this run's net is dropout, not lenet"),
        ({"num_classes": 12}, "this run's num_classes is 10, not 12"),
    ):
        with pytest.raises(UsageError, match=line):
            run(tmp_path, settings, resume=True)
    rates = [values["lr"] for _, values in run(tmp_path, {"lr": 0.002}, resume=True).rows if "lr" in values]
    assert rates == pytest.approx([0.002] * len(rates)) and rates
