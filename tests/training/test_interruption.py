"""A run that is stopped by a signal or dies resumes bit-equal from any of its checkpoints."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from contract.command_line import undone
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import (
    BATCHES,
    MOMENTUM,
    At,
    Rows,
    best_and_last,
    classifier,
    features,
    fitted,
    same,
    shapes_data,
    weights,
)
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.signals import STOP_SIGNALS
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.features import FEATURES
from cifar_lit.training.callbacks import Clock, RandomState
from cifar_lit.training.checkpoint import LastCheckpoint, read_checkpoint, regular_checkpoint
from cifar_lit.training.orderly_stop import Interrupted, NoSignalHandlers, OrderlyStop

pytestmark = pytest.mark.usefixtures("dropout_net")


@pytest.fixture(autouse=True)
def _signals_given_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "averaged": {
        "schedule": "one_cycle",
        "optimizer_options": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        "weight_average": {"decay": 0.9},
    },
    "smaller images first": {"schedule": "triangular", "resolutions": {"sides": {8: 0.4, 12: 0.3}}},  # an epoch each
    "augmented": {
        "label_smoothing": 0.1,
        "augment": {"cutout": 4, "mixup": 0.4, "cutmix": 1},
    },
}


class Run(NamedTuple):
    """The results of a training."""

    weights: dict[str, Tensor]
    rows: list[tuple[int, dict[str, float]]]
    images: int
    epoch_loss: float  # the mean over the last epoch
    best: dict[str, Any]


class Training:
    """Training runs with all callbacks of a command, which save their checkpoints to one folder.

    Args:
        every: interval of checkpoints within epochs.
        accumulate: batches per update.
        limits: arguments of the Trainer; three epochs by default.
    """

    def __init__(self, folder: Path, name: str, every: Any = None, accumulate: int = 1, limits: Any = None) -> None:
        self.folder, self.last, self.limits = folder, folder / "last.ckpt", limits or {"max_epochs": 3}
        self.settings, self.every, self.accumulate = SETTINGS[name], every, accumulate
        self.rows = Rows()  # latest run, complete or not

    def run(self, *more: Callback, resume: Path | None = None) -> Run:
        """Train to the end."""
        settings = {"net": "dropout", **MOMENTUM, **self.settings}
        added = features(settings)
        settings = {name: value for name, value in settings.items() if name not in FEATURES}
        augment = {"crop": 2, "flip": "random", **settings.pop("augment", {})}
        data = shapes_data(augment=augment)
        model, clock, (best, last) = classifier(**settings), Clock(), best_and_last(self.folder)
        regular = [regular_checkpoint(self.every)] if self.every else []
        for callback in regular:
            callback.dirpath = str(self.folder)
        self.rows = Rows()
        options: dict[str, Any] = {"log_every_n_steps": 2, "accumulate_grad_batches": self.accumulate, **self.limits}
        callbacks = [*added, NoSignalHandlers(), *more, clock, RandomState(), best, last, *regular, OrderlyStop(last)]
        done = fitted(model, data, *callbacks, resume=resume, logger=self.rows, **options)
        epoch_loss = float(done.callback_metrics.get("train/loss", math.nan))  # NaN if no step was left
        return Run(weights(model), self.rows.rows, clock.images, epoch_loss, read_checkpoint(self.folder / "best.ckpt"))

    def stop(self, callback: Callback, error: type[BaseException] = Interrupted) -> Any:
        """Return the exception that ends a training stopped by this callback."""
        with pytest.raises(error) as ended:
            self.run(callback)
        torch.manual_seed(99)  # a resuming process has another random state
        return ended.value

    def assert_resumes_to(self, whole: Run, every: str | None = None) -> None:
        """Resume to the weights, curves and best checkpoint of the uninterrupted run."""
        reached = read_checkpoint(self.last)["global_step"]
        before = [row for row in self.rows.rows if row[0] <= reached]
        self.every = every
        resumed = self.run(resume=self.last)
        assert same(resumed.weights, whole.weights)
        assert [*before, *resumed.rows] == whole.rows
        assert resumed.images == whole.images == 300
        assert resumed.epoch_loss == whole.epoch_loss or not resumed.rows
        assert resumed.best["epoch"] == whole.best["epoch"]
        assert same(resumed.best["state_dict"], whole.best["state_dict"])


GetRun = Callable[..., Run]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> GetRun:
    """Return a function that returns the uninterrupted run of given settings, trained once."""

    def train(name: str, accumulate: int = 1) -> Run:
        return Training(tmp_path_factory.mktemp("whole"), name, accumulate=accumulate).run()

    return cache(train)


# ---- signals


def press(*numbers: int) -> Callable[..., None]:
    return lambda *_: [os.kill(os.getpid(), number) for number in numbers]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("sgd", 1),
        ("averaged", 20),
        ("smaller images first", 9),
        ("augmented", 9),
    ],
)
def test_a_run_stopped_in_an_epoch_resumes_bit_equal(tmp_path: Path, name: str, step: int, reference: GetRun) -> None:
    whole, training = reference(name), Training(tmp_path, name)
    interruption = training.stop(At(step, press(signal.SIGINT)))
    assert (str(interruption), interruption.exit_code) == ("SIGINT", 130)
    checkpoint = read_checkpoint(training.last)
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (step, step // BATCHES)
    training.assert_resumes_to(whole)


def test_a_stop_waits_for_the_accumulated_update(tmp_path: Path, reference: GetRun) -> None:
    def between(trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):  # first of three accumulated batches
            press(signal.SIGINT)()

    training = Training(tmp_path, "sgd", accumulate=3)
    training.stop(LambdaCallback(on_train_batch_start=between))
    assert read_checkpoint(training.last)["global_step"] == 3 + 2
    training.assert_resumes_to(reference("sgd", accumulate=3))


def test_a_second_signal_stops_at_once_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path, "sgd").stop(At(2, press(signal.SIGINT, signal.SIGINT)))
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.count("press Ctrl-C again to stop immediately") == 1


@pytest.fixture
def hangup_handler() -> Iterator[None]:
    """Restore this process's SIGHUP handler. After a hangup, the signal is ignored."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


@pytest.mark.usefixtures("hangup_handler")
def test_a_lost_session_stops_with_a_checkpoint_after_two_signals(tmp_path: Path, reference: GetRun) -> None:
    training = Training(tmp_path, "averaged")
    both = press(signal.SIGHUP, signal.SIGHUP)  # from the shell and from the kernel
    assert training.stop(At(9, both)).exit_code == 129
    assert read_checkpoint(training.last)["global_step"] == 9
    training.assert_resumes_to(reference("averaged"))


@pytest.mark.usefixtures("hangup_handler")
def test_a_hangup_outside_training_raises_once_and_never_under_nohup() -> None:
    with undone():
        catch_signals()
        with pytest.raises(Interrupted) as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
        assert interruption.value.exit_code == 129
        os.kill(os.getpid(), signal.SIGHUP)  # ignored after the first
        catch_signals()
        os.kill(os.getpid(), signal.SIGHUP)


# ---- checkpoints within epochs


def test_an_invalid_checkpoint_interval_is_refused() -> None:
    for interval in (0, "0m", "-3", "1.5", "10 m", "10w"):
        with pytest.raises(
            UsageError, match=r"--checkpoint-every must be a number of steps \(500\) or a time \(10m, 90s, 1h\), not"
        ):
            regular_checkpoint(interval)


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"),
    [("3", 1, [3, 6, 7, 9, 12, 14]), ("60s", 2, [2, 4, 5, 7, 8])],
)
def test_checkpoints_within_epochs_are_saved_between_updates_and_change_nothing(
    every: str, accumulate: int, steps: list[int], tmp_path: Path, reference: GetRun, monkeypatch: Any
) -> None:
    """A checkpoint that is due after the first of two accumulated batches waits for the second."""
    whole, saved, now = reference("averaged", accumulate), list[int](), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    note = LambdaCallback(
        on_train_batch_start=lambda *_: now.append(now.pop() + 25),  # seconds
        on_save_checkpoint=lambda trainer, *_: saved.append(trainer.global_step),
    )
    result = Training(tmp_path, "averaged", every, accumulate).run(note)
    assert sorted({step for step in saved if step <= steps[-1]}) == steps  # in the first two epochs
    assert all(saved.count(step) == 1 for step in steps if step % (BATCHES // accumulate + accumulate - 1))
    assert same(result.weights, whole.weights) and result.rows == whole.rows


@pytest.mark.parametrize(("seconds", "epochs"), [(0, [6]), (2, [2, 5, 6])])
def test_short_epochs_share_a_checkpoint_and_the_last_epoch_has_its_own(
    seconds: int, epochs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint per epoch would take much of a fit of one second."""
    saved, now, last = list[int](), count(100, seconds), best_and_last(tmp_path)[1]

    def pass_time(*_: Any) -> None:
        time_now = next(now)
        monkeypatch.setattr(time, "monotonic", lambda: time_now)

    pass_time()
    note = LambdaCallback(
        on_train_epoch_end=pass_time, on_save_checkpoint=lambda trainer, *_: saved.append(trainer.current_epoch)
    )
    fitted(classifier(), shapes_data(), last, note, max_epochs=7)
    assert saved == epochs


def test_a_stop_after_an_epoch_without_a_checkpoint_waits_for_the_next_step(
    tmp_path: Path, reference: GetRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    training, send = Training(tmp_path, "averaged"), press(signal.SIGTERM)
    training.stop(LambdaCallback(on_train_epoch_start=lambda trainer, _: trainer.current_epoch == 1 and send()))
    assert read_checkpoint(training.last)["global_step"] == BATCHES + 1
    training.assert_resumes_to(reference("averaged"))


def fail(*_: Any) -> None:
    raise RuntimeError("failed on purpose")


@pytest.mark.parametrize(
    ("end", "accumulate", "every", "reached", "limits"),
    [(7, 2, "3", 6, None), (11, 1, None, 7, {"max_epochs": -1, "max_steps": 3 * BATCHES})],
)
def test_a_run_that_died_resumes_bit_equal_from_its_last_checkpoint(
    end: int, accumulate: int, every: str | None, reached: int, limits: Any,
    tmp_path: Path, reference: GetRun, recwarn: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not every:  # with an interval, every epoch ends with a checkpoint
        monkeypatch.setattr(LastCheckpoint, "MIN_INTERVAL", 0.0)
    training = Training(tmp_path, "averaged", every, accumulate, limits)
    training.stop(At(end, fail), RuntimeError)
    assert read_checkpoint(training.last)["global_step"] == reached
    training.assert_resumes_to(reference("averaged", accumulate), every=every and "5")  # the interval may change
    assert not [warning for warning in recwarn if "callbacks used to create the checkpoint" in str(warning.message)]


@pytest.mark.parametrize(("every", "end", "reached"), [("3", 5, 3), (None, 3, 3)])
def test_a_validation_due_at_a_stop_is_not_lost(every: str | None, end: int, reached: int, tmp_path: Path) -> None:
    limits = {"max_epochs": 3, "val_check_interval": 3}
    whole = Training(tmp_path / "whole", "averaged", limits=limits).run()
    training = Training(tmp_path / "stopped", "averaged", every, limits=limits)
    callback, error = (At(end, fail), RuntimeError) if every else (At(end, press(signal.SIGINT)), Interrupted)
    training.stop(callback, error)
    checkpoint = read_checkpoint(training.last)
    assert checkpoint["global_step"] == reached and checkpoint["cifar_lit"]["score"] is not None
    training.assert_resumes_to(whole)
