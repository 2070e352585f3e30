"""Rows of the training curves: an accelerator is not waited for, and what is logged does not depend on it."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.loops import fit_loop
from small_runs import (
    BATCHES,
    At,
    Rows,
    best_and_last,
    broken_data,
    classifier,
    fitted,
    shapes_data,
    stop_at,
    trainer,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cifar_lit.data import datamodule
from cifar_lit.data.preprocessing import place_images
from cifar_lit.features.capture import Capture
from cifar_lit.training import rows
from cifar_lit.training.callbacks import Clock, DivergenceWarning, EpochLines, LiveBar
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop
from cifar_lit.training.rows import LateRows, reads_late


class Event:
    """An event of a device that reaches it after `delay` queries, or when the host waits for it."""

    delay = math.inf

    def __init__(self) -> None:
        self._queries = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self._queries += 1
        return self._queries > self.delay

    def synchronize(self) -> None:
        pass


# ---- a device whose values cannot be read


class NoBlockingCopies(TorchDispatchMode):
    """Refuse copies from pageable host memory to a meta tensor: on a GPU, they wait for all queued work."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        result = function(*args, **kwargs)
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if isinstance(result, Tensor) and result.is_meta:
            assert name != "lift_fresh", "a number of the host is copied to the device"
            if name in ("_to_copy", "copy_") and not all(value.is_meta for value in inputs):
                is_late = kwargs.get("non_blocking") or any(value is True for value in args)
                assert is_late, f"{name} waits for the device"
        return result


class BetweenSteps(Callback):
    """Refuse blocking copies between the first step and the last."""

    def __init__(self, last_step: int) -> None:
        self._last_step, self._mode = last_step, NoBlockingCopies()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:  # Captured steps have such rates.
            group["lr"] = torch.tensor(group["lr"], device=pl_module.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self._mode.__enter__()
        elif trainer.global_step == self._last_step:
            self._mode.__exit__(None, None, None)


def test_a_training_reads_nothing_from_its_device_before_the_last_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Meta tensors raise an error when their values are read."""
    device = torch.device("meta")
    copies: list[bool] = []

    def copy_to_host(value: Any, late: bool) -> Any:
        copies.append(late)
        assert value is None or value.is_meta
        return value if value is None else torch.tensor([[8.0, 1.0, 4.0, 0.0, 7.0]] if value.ndim else 2.0)

    on_host = torch.device("cpu")
    monkeypatch.setattr(datamodule, "place_images", lambda images, kind, _: place_images(images, kind, on_host))
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(fit_loop, "has_len_all_ranks", lambda *_, **__: True)  # reads a tensor before the fit
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event, synchronize=lambda: None))
    monkeypatch.setattr(rows, "copy_to_host", copy_to_host)
    monkeypatch.setattr(rows, "reads_late", lambda *_: True)
    clock, logged = Clock(), Rows()
    callbacks = [LiveBar(), clock, EpochLines(clock), DivergenceWarning(), BetweenSteps(3 * BATCHES)]
    settings: dict[str, Any] = {"log_every_n_steps": 3, "logger": logged, "enable_progress_bar": True}
    used: Any = trainer(*callbacks, max_epochs=3, limit_val_batches=0, **settings)
    used.strategy._root_device, used.strategy.teardown = device, lambda: None
    used.strategy.accelerator.setup_device = lambda _: None
    used.fit(classifier(**MUON), datamodule=shapes_data())
    assert list(logged.curve("train/loss")) == [3, 6, 7, 10, 13, 14, 17, 20, 21]
    assert copies == 8 * 3 * [True] + 3 * [False]
    assert capsys.readouterr().out.count("train loss 2.0000 acc 0.2500") == 3


# ---- the same rows and lines on a device that is waited for later


@pytest.fixture(params=[math.inf, 1], ids=["arrives when awaited", "arrives a step later"])
def late(request: pytest.FixtureRequest, late_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fits with `LateRows` log late on the CPU."""
    monkeypatch.setattr(Event, "delay", request.param)


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let fits with `LateRows` log each row when it is awaited."""
    copies: list[bool] = []
    copy_to_host = rows.copy_to_host

    def copied(value: Any, late: bool) -> Any:
        copies.append(late)
        return copy_to_host(value, late)

    monkeypatch.setattr(rows, "copy_to_host", copied)
    monkeypatch.setattr(rows, "reads_late", lambda *_: True)
    monkeypatch.setattr(rows, "record_event", lambda _: Event())
    yield
    assert True in copies


class Bar(Callback):
    """Record what a progress bar shows at the end of the training, and the metrics that callbacks see there."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.shown = dict(trainer.progress_bar_metrics)
        self.seen = {name: float(value) for name, value in trainer.callback_metrics.items()}


MUON = {"optimizer": "muon", "optimizer_options": {"momentum": 0.6, "bias_lr": 0.01}, "schedule": "cosine"}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a row per epoch": ({"log_every_n_steps": 1000, "limit_val_batches": 0}, {}),
    "several rows per epoch": ({"log_every_n_steps": 3}, {}),
    "a row per step": ({"log_every_n_steps": 1}, {}),
    "without validation": ({"log_every_n_steps": 3, "limit_val_batches": 0}, {}),
    "validation within epochs": ({"log_every_n_steps": 2, "val_check_interval": 3}, {}),
    "accumulated gradients": ({"log_every_n_steps": 2, "accumulate_grad_batches": 2}, {}),
    "end within an epoch": ({"log_every_n_steps": 4, "max_steps": 17, "limit_val_batches": 0}, {}),
    "several rates": ({"log_every_n_steps": 4, "limit_val_batches": 0}, MUON),
    "captured steps": ({"log_every_n_steps": 4, "limit_val_batches": 0}, {"schedule": "cosine"}),
}


@pytest.mark.usefixtures("late", "fake_graphs")
@pytest.mark.parametrize("name", SETTINGS)
def test_late_rows_and_lines_equal_those_of_a_waiting_host(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, model_settings = SETTINGS[name]
    ends: list[Any] = []
    for callbacks in ([], [LateRows()]):
        logged, clock, bar = Rows(), Clock(), Bar()
        capture = [Capture(compile=False)] if name == "captured steps" else []
        watchers = [*capture, clock, EpochLines(clock), bar, *callbacks]
        model = classifier(**model_settings)
        fitted(model, shapes_data(), *watchers, logger=logged, **{"max_epochs": 3, **settings})
        lines = [line.partition(" s ·")[0].rpartition(" · ")[0] for line in capsys.readouterr().out.splitlines()]
        ends.append((logged.rows, [line for line in lines if line], bar.shown, bar.seen, model.rows.loss))
    expected, result = ends
    assert result == expected
    assert len(expected[1]) == 3


@pytest.mark.usefixtures("late_device")
@pytest.mark.parametrize(("delay", "steps"), [(0, [7, 14, 21]), (1, [8, 15, 21]), (math.inf, [14, 21, 21])])
def test_a_row_is_logged_as_soon_as_its_values_have_arrived(
    delay: float, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "delay", delay)
    logged, written = Rows(), []
    used = trainer(LateRows(), logger=logged, max_epochs=3, limit_val_batches=0, log_every_n_steps=1000)
    monkeypatch.setattr(logged, "log_metrics", lambda values, step: written.append((step, used.global_step)))
    used.fit(classifier(), datamodule=shapes_data())
    assert [step for step, _ in written] == [7, 14, 21]
    assert [now for _, now in written] == steps


def test_rows_before_a_validation_are_awaited_in_the_time_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "reads_late", lambda *_: True)
    monkeypatch.setattr(rows, "record_event", lambda _: pytest.fail("the row is late"))
    fitted(classifier(), shapes_data(), LateRows(), logger=Rows(), log_every_n_steps=1000)


class Moment(Callback):
    """Set a clock to one second per step."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._clock.seconds = trainer.global_step


@pytest.mark.usefixtures("late_device")
def test_a_late_line_shows_the_time_at_the_end_of_its_epoch(capsys: Any) -> None:
    clock: Any = SimpleNamespace(seconds=0, training_seconds=7.0, images=0)
    settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 1000, "max_epochs": 3}
    fitted(classifier(), shapes_data(), Moment(clock), EpochLines(clock), LateRows(), **settings)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 3 and all(line.endswith("· 7.0 s") for line in lines)


@pytest.mark.usefixtures("late_device")
def test_divergence_is_reported_after_a_late_row(capsys: pytest.CaptureFixture[str]) -> None:
    def blow_up(trainer: Any, model: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 30.0

    with suppress(NotFiniteLoss):
        settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 2}
        fitted(classifier(), shapes_data(), LateRows(), DivergenceWarning(), At(3, blow_up, after=True), **settings)
    assert capsys.readouterr().err.count("the training diverges") == 1


# ---- checkpoints, errors, the end


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("validates", "interval"), [(True, 0.0), (False, 0.0), (False, 60.0)])
@pytest.mark.parametrize("step", [0, 6, 7, 12])
def test_a_late_row_with_a_non_finite_loss_ends_the_fit_before_a_checkpoint(
    step: int, validates: bool, interval: float, tmp_path: Path
) -> None:
    best, last = best_and_last(tmp_path)
    last.MIN_INTERVAL = interval  # type: ignore[attr-defined]
    limits = {} if validates else {"limit_val_batches": 0}
    logged, watch = Rows(), LambdaCallback(on_train_start=lambda _, model: model.watch_losses())
    callbacks = [LateRows(), watch, *([best, last] if validates else [last])]
    with pytest.raises(NotFiniteLoss, match=rf"^the loss is not finite at step {step} of epoch {step // BATCHES}$"):
        fitted(classifier(), broken_data(step), *callbacks, logger=logged, log_every_n_steps=3, max_epochs=3, **limits)
    epochs = {read_checkpoint(path)["epoch"] for path in tmp_path.iterdir()}
    assert epochs == (set() if step < BATCHES or interval else {0})
    assert max(logged.curve("train/loss"), default=0) <= step


@pytest.mark.usefixtures("late")
def test_with_accumulated_gradients_the_step_of_a_late_non_finite_loss_is_the_optimizers() -> None:
    watch = LambdaCallback(on_train_start=lambda _, model: model.watch_losses())
    with pytest.raises(NotFiniteLoss, match=r"^the loss is not finite at step 1 of epoch 0$"):
        fitted(classifier(), broken_data(3), LateRows(), watch, accumulate_grad_batches=2, log_every_n_steps=1)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("stop", [3, 7, 8, 10])
def test_a_resumed_run_logs_each_late_row_once(stop: int, tmp_path: Path) -> None:
    def run(resume: Path | None = None, stop: int = -1) -> list[Any]:
        logged, last = Rows(), best_and_last(tmp_path)[1]
        orderly = OrderlyStop(last)  # type: ignore[arg-type]
        callbacks = [LateRows(), last, stop_at(orderly, stop), orderly]
        settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 3, "max_epochs": 3}
        with suppress(Interrupted):
            fitted(classifier(), shapes_data(), *callbacks, resume=resume, logger=logged, **settings)
        return logged.rows

    expected = run()
    first = run(stop=stop)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    saved = read_checkpoint(middle)["cifar_lit"]
    assert saved["logged_step"] == max((step for step, _ in first), default=0)
    assert saved["epoch_sums"][2] == {3: 48, 7: 0, 8: 0, 10: 48}[stop]  # images in the rows of this epoch
    assert first + run(middle) == expected


@pytest.mark.usefixtures("late_device")
def test_a_late_row_is_logged_before_an_error_ends_the_fit() -> None:
    def fail(*_: Any) -> None:
        raise ValueError

    logged = Rows()
    settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 1000}
    with pytest.raises(ValueError):
        fitted(classifier(), shapes_data(), LateRows(), At(10, fail), logger=logged, **settings)
    assert list(logged.curve("train/loss")) == [BATCHES]


class StopAfterEpoch(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


@pytest.mark.usefixtures("late_device")
def test_a_fit_that_a_callback_stops_logs_its_last_row_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    logged, clock = Rows(), Clock()
    settings: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 1000, "max_epochs": 5}
    callbacks = [clock, EpochLines(clock), StopAfterEpoch(), LateRows()]
    fitted(classifier(), shapes_data(), *callbacks, logger=logged, **settings)
    assert list(logged.curve("train/loss")) == [BATCHES]
    assert capsys.readouterr().out.count("epoch 1/5 · train loss") == 1


# ---- which fits log late


def test_rows_are_late_only_on_one_accelerator_without_a_reader_of_training_losses() -> None:
    model = classifier()

    def late(*callbacks: Callback, device: str = "cuda", world_size: int = 1) -> bool:
        strategy = SimpleNamespace(root_device=torch.device(device))
        fit: Any = SimpleNamespace(strategy=strategy, world_size=world_size, callbacks=[*callbacks])
        return reads_late(fit, model)

    clock = Clock()
    assert late() and late(clock, EpochLines(clock), LiveBar(), Timer(), LateRows())
    assert late(EarlyStopping("val/loss"), ModelCheckpoint(monitor="val/accuracy"), ModelCheckpoint(monitor=None))
    assert not late(device="cpu") and not late(device="mps") and not late(world_size=2)
    assert not late(EarlyStopping("train/loss")) and not late(ModelCheckpoint(monitor="train/accuracy"))
    assert not late(StopAfterEpoch()) and not late(LambdaCallback())
    model.__class__ = type("Own", (type(model),), {"__module__": "own"})
    assert not late()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_fits_on_an_accelerator_have_late_rows(device: str) -> None:
    model = classifier()
    model.trainer = fit = trainer()
    fit.strategy._root_device = torch.device(device)  # type: ignore[attr-defined]
    for _ in range(2):  # a Trainer keeps the callbacks of its first fit
        fit.callbacks += model.configure_callbacks()  # type: ignore[attr-defined]
        assert sum(isinstance(each, LateRows) for each in fit.callbacks) == (device == "cuda")  # type: ignore[attr-defined]
