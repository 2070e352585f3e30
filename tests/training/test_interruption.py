import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Rows, classifier, fitted, same, shapes_data, weights

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import Clock, Interrupted, OrderlyStop, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, read_checkpoint

pytestmark = pytest.mark.usefixtures("dropout_net")

STEPS = 7  # an epoch, of which there are three


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


def run(folder: Path, settings: dict[str, Any], *more: Callback, resume: bool = False) -> tuple[dict[str, Any], Rows, Clock]:
    """Trains three epochs with all callbacks of a run; returns the weights at the end, the curves and the clock."""
    rows, clock, best, last = Rows(), Clock(), best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(folder)
    model = classifier(**{"net": "dropout", "momentum": 0.9, **settings})
    callbacks = [*more, clock, RandomState(), best, last, OrderlyStop(last)]
    checkpoint = folder / "last.ckpt" if resume else None
    data = shapes_data(crop=2, flip="random")
    options = {"logger": rows, "log_every_n_steps": 2, "max_epochs": 3, "enable_checkpointing": True}
    try:
        fitted(model, data, *callbacks, resume=checkpoint, **options)
    except Interrupted as interruption:
        interruption.rows = rows  # type: ignore[attr-defined]
        raise
    return weights(model), rows, clock


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "one cycle": {"schedule": "one_cycle", "weight_decay": 1e-3, "nesterov": True},
    "adamw, by the epoch": {"optimizer": "adamw", "lr": 0.01, "schedule": "cosine", "schedule_every": "epoch"},
    "average": {"ema_decay": 0.9},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("step", [1, 4, 6, 9, 11, 20])
def test_a_run_that_was_stopped_in_mid_epoch_goes_on_as_if_it_had_not_been(tmp_path: Path, name: str, step: int) -> None:
    expected, curves, clock = run(tmp_path / "whole", SETTINGS[name])
    with pytest.raises(Interrupted, match="SIGINT") as stopped:
        run(tmp_path / "parts", SETTINGS[name], Press(step=step))
    assert stopped.value.exit_code == 130
    checkpoint = read_checkpoint(tmp_path / "parts" / "last.ckpt")
    assert (checkpoint["global_step"], checkpoint["epoch"]) == (step, step // STEPS)
    torch.manual_seed(99)  # another process would not have this state either
    found, rest, resumed_clock = run(tmp_path / "parts", SETTINGS[name], resume=True)
    assert same(found, expected)
    assert [*stopped.value.rows.rows, *rest.rows] == curves.rows  # type: ignore[attr-defined]
    assert resumed_clock.images == clock.images == 300
    whole, parts = (read_checkpoint(tmp_path / folder / "best.ckpt") for folder in ("whole", "parts"))
    assert whole["epoch"] == parts["epoch"]
    assert same(whole["state_dict"], parts["state_dict"])


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_signal_during_validation_ends_the_epoch_first(tmp_path: Path, epoch: int) -> None:
    expected, curves, _ = run(tmp_path / "whole", {})
    with pytest.raises(Interrupted) as stopped:
        run(tmp_path / "parts", {}, Press(epoch=epoch, number=signal.SIGTERM))
    assert stopped.value.exit_code == 143
    assert read_checkpoint(tmp_path / "parts" / "last.ckpt")["global_step"] == STEPS * (epoch + 1)
    found, rest, _ = run(tmp_path / "parts", {}, resume=True)
    assert same(found, expected)
    assert [*stopped.value.rows.rows, *rest.rows] == curves.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("press", [Press(step=3 * STEPS), Press(epoch=2)])
def test_a_signal_in_the_last_moments_counts_after_the_last_checkpoint(tmp_path: Path, press: Press) -> None:
    expected, _, _ = run(tmp_path / "whole", {})
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", {}, press)
    checkpoint = read_checkpoint(tmp_path / "parts" / "last.ckpt")
    assert checkpoint["global_step"] == 3 * STEPS
    assert same(checkpoint["state_dict"], expected)
    found, rest, _ = run(tmp_path / "parts", {}, resume=True)
    assert same(found, expected)
    assert rest.rows == []


def test_a_second_signal_stops_at_once_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted, match="SIGINT"):
        run(tmp_path, {}, Press(step=2, times=2))
    assert not (tmp_path / "last.ckpt").exists()
    assert capsys.readouterr().err.count("once more to stop at once") == 1


def test_the_checkpoint_of_a_finished_epoch_resumes_exactly(tmp_path: Path) -> None:
    expected, curves, _ = run(tmp_path / "whole", SETTINGS["one cycle"])

    class Crash(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == STEPS + 3:
                raise RuntimeError("pulled the plug")

    with pytest.raises(RuntimeError, match="plug"):
        run(tmp_path / "parts", SETTINGS["one cycle"], Crash())
    found, rest, _ = run(tmp_path / "parts", SETTINGS["one cycle"], resume=True)
    assert same(found, expected)
    assert rest.rows == [row for row in curves.rows if row[0] > STEPS]


def test_a_resumed_run_uses_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, {"lr": 0.05}, Press(step=9))
    _, rest, _ = run(tmp_path, {"lr": 0.002}, resume=True)
    assert list(rest.of("lr").values()) == pytest.approx([0.002] * len(rest.of("lr")))


def test_a_resumed_run_cannot_change_its_optimizer_or_net(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, {}, Press(step=9))
    with pytest.raises(UsageError, match="was trained with sgd"):
        run(tmp_path, {"optimizer": "adamw", "lr": 0.01}, resume=True)
    with pytest.raises(UsageError, match="this run's net is dropout, not lenet"):
        run(tmp_path, {"net": "lenet"}, resume=True)
    with pytest.raises(UsageError, match="this run's num_classes is 10, not 12"):
        run(tmp_path, {"num_classes": 12}, resume=True)
