"""Captured steps train like eager ones, and end a diverged training at the same step.

The tests run on the CPU with fake graphs, and on a CUDA device if there is one.
"""

import gc
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import recorded_graphs
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import (
    BATCHES,
    Rows,
    assert_close,
    best_and_last,
    broken_data,
    classifier,
    fitted,
    same,
    shapes_data,
    stop_at,
    trainer,
    weights,
)
from torch import Tensor

from cifar_lit.data.batch import Batch
from cifar_lit.training import captured
from cifar_lit.training.callbacks import Clock, NotFiniteLoss, RandomState
from cifar_lit.training.captured import GraphedSteps, device_graphs
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.metrics import RunningMetrics
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop

pytestmark = pytest.mark.usefixtures("dropout_net")


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> recorded_graphs.Module:
    """Let the trainings of this test capture their steps on the CPU."""
    module = recorded_graphs.Module()
    monkeypatch.setattr(captured, "device_graphs", lambda device: module)
    return module


class Device:
    """The CPU with fake graphs, where results are bit-equal, or a CUDA device, where they are equal up to rounding."""

    def __init__(self, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.accelerator, self.captures = accelerator, 0
        self.rtol = 0.02 if accelerator == "gpu" else 1e-4  # for losses and rates
        step = GraphedSteps._step

        def counted(steps: GraphedSteps, batch: Any) -> Tensor:
            self.captures -= len(steps._captured)
            loss = step(steps, batch)
            self.captures += len(steps._captured)
            return loss

        monkeypatch.setattr(GraphedSteps, "_step", counted)

    def assert_alike(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], settings: dict[str, Any]) -> None:
        """Compare up to rounding: Muon multiplies in bfloat16, and schedules round rates to float32."""
        if self.accelerator == "gpu":
            assert_close(first, second, *((0.05, 0.02) if settings.get("optimizer") == "muon" else (1e-3, 1e-4)))
        elif "schedule" in settings:
            assert_close(first, second, 1e-4, 1e-5)
        else:
            assert same(first, second)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Disable TensorFloat32, whose rounding would hide differences."""
    precision = torch.get_float32_matmul_precision()
    if request.param == "cpu":
        request.getfixturevalue("fake_graphs")
    elif not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    else:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        torch.set_float32_matmul_precision("highest")
    yield Device(request.param, monkeypatch)
    torch.set_float32_matmul_precision(precision)


# ---- the same training

MUON = {"optimizer": "muon", "momentum": 0.6}
NET = {"net": "whitened", "net_options": {"widths": [8, 12]}}
WHITENED: dict[str, Any] = {**MUON, **NET, "schedule": "triangular", "lr": 2**-6}
NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "muon, whitening's end within an epoch": ({**WHITENED, "whiten_epochs": 2.5}, {}, {}),
    "Nesterov, clipped by norm": (NESTEROV, {}, {"gradient_clip_val": 0.05}),
    "clipped by value": ({"label_smoothing": 0.1}, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "adamw": ({"optimizer": "adamw", "lr": 2**-10, "weight_decay": 0.1}, {}, {"gradient_clip_val": 0.05}),
    "smaller images first, norms": ({"net": "shapenet", "momentum": 0.9}, {"resolutions": {8: 0.4, 12: 0.2}}, {}),
    "without the easy images": ({"momentum": 0.9}, {"skip_easy": 0.5, "skip_from": 0.1}, {}),
    "class weights": ({"momentum": 0.9, "class_weights": "balanced"}, {}, {}),
    "bfloat16": ({"momentum": 0.9}, {}, {"precision": "bf16-mixed"}),
    "mixed images": ({"label_smoothing": 0.1}, {"augment": {"brightness": 0.4, "mixup": 0.4, "cutmix": 1.0}}, {}),
    "an average, a schedule by the step": ({"momentum": 0.9, "schedule": "one_cycle", "ema_decay": 0.9}, {}, {}),
    "a schedule by the epoch": ({"schedule": "cosine", "schedule_every": "epoch"}, {}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_captured_steps_train_and_log_like_eager_steps(name: str, device: Device) -> None:
    model_settings, data_settings, trainer_settings = SETTINGS[name]
    # One graph per batch size (two), times three image sizes, or with and without a gradient of the whitening bias.
    captures = {"smaller images first, norms": 6, "muon, whitening's end within an epoch": 4}.get(name, 2)
    ends: list[Any] = []
    for capture in (False, True):
        rows, clock, model = Rows(), Clock(), classifier(**{"capture": capture, "lr": 2**-6, **model_settings})
        data = shapes_data(crop=2, flip="random", **data_settings)
        settings = {"accelerator": device.accelerator, "logger": rows, "log_every_n_steps": 4, "max_epochs": 5}
        done = fitted(model, data, clock, **settings, **trainer_settings)
        assert device.captures == (captures if capture else 0)
        ends.append((weights(model), rows.rows, done.global_step, clock.images))
    (expected, eager_rows, *eager_counts), (state, rows, *counts) = ends
    assert counts == eager_counts
    only_losses = device.accelerator == "gpu" and name == "bfloat16"
    if not only_losses:
        device.assert_alike(state, expected, model_settings)
    for (step, values), (eager_step, eager) in zip(rows, eager_rows, strict=True):
        assert step == eager_step
        for each in {"train/loss", "lr"} & eager.keys() if device.accelerator == "gpu" else eager:
            assert values[each] == pytest.approx(eager[each], rel=0.05 if only_losses else device.rtol, abs=1e-6)


def test_dropout_draws_new_numbers_at_every_replay(device: Device) -> None:
    rows, model = Rows(), classifier(net="dropout", lr=1e-12, capture=True)
    settings: dict[str, Any] = {"log_every_n_steps": 7, "accelerator": device.accelerator, "max_epochs": 4}
    fitted(model, shapes_data(shuffle=False), logger=rows, **settings)
    losses = list(rows.curve("train/loss").values())
    assert len(set(losses)) == len(losses) == 4


@pytest.mark.parametrize(
    "settings", [{**WHITENED, "whiten_epochs": 1.5}, {"net": "dropout"}, {"optimizer": "adamw"}], ids=str
)
def test_captures_come_first_and_leave_no_trace(settings: dict[str, Any], fake_graphs: recorded_graphs.Module) -> None:
    whitened = "whiten_epochs" in settings
    starts: list[Any] = []

    def note_start(trainer: Any, model: Any) -> None:
        state = states(trainer)
        assert not any(value.any() for value in state.values())
        running = [tensor.clone() for tensor in model.running.tensors]
        starts.append((weights(model), torch.get_rng_state(), running, fake_graphs.captures, fake_graphs.replays))

    for capture in (False, True):
        data = shapes_data(resolutions={8: 0.5} if whitened else None)
        model = classifier(capture=capture, **settings)
        done = fitted(model, data, LambdaCallback(on_train_start=note_start), max_epochs=4)
    (expected, eager_random, eager_running, *_), (state, random, running, captures, replays) = starts
    assert same(state, expected) and torch.equal(random, eager_random)
    assert all(torch.equal(*pair) for pair in zip(running, eager_running, strict=True))
    # Two batch sizes. The whitened net has two image sizes, and at the first one a bias that is trained, then final.
    assert captures == fake_graphs.captures == (6 if whitened else 2)
    assert fake_graphs.replays - replays == done.global_step == 4 * BATCHES


class Hooked(Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


def test_a_fit_captures_on_one_stream_into_one_pool(fake_graphs: recorded_graphs.Module) -> None:
    """Memory freed on another stream cannot be reused, and a pool that outlives its graphs breaks the next capture."""
    assert device_graphs(torch.device("cpu")) is None
    fitted(classifier(capture=True), shapes_data(), Hooked(), max_epochs=4)
    fitted(classifier(capture=True), shapes_data(), max_epochs=4, accumulate_grad_batches=2)
    assert not fake_graphs.captures
    model = classifier(capture=True)
    for fits in (1, 2):
        fitted(model, shapes_data(), max_epochs=4)
        assert (len(fake_graphs.streams), len(fake_graphs.pools)) == (fits, fits)


def test_graphs_are_freed_at_the_end_of_the_fit_without_garbage_collection(fake_graphs: recorded_graphs.Module) -> None:
    """In torch 2.12 to 2.14 a graph that dies during the next fit frees the workspace of that fit."""
    gc.disable()
    try:
        model = classifier(capture=True)
        fitted(model, shapes_data())
        assert fake_graphs.captures == 2 and not fake_graphs.graphs
        used, failed = trainer(), classifier(capture=True)
        with pytest.raises(NotFiniteLoss):
            used.fit(failed, datamodule=broken_data(5))
        assert fake_graphs.captures == 4 and not fake_graphs.graphs
        fitted(model, shapes_data())
    finally:
        gc.enable()


# ---- a loss that is not finite


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 2**-6},
    "Nesterov": {"lr": 2**-6, **NESTEROV},
    "muon": {"lr": 2**-6, **MUON},
    "adamw": {"optimizer": "adamw", "lr": 2**-7, "weight_decay": 0.1},
}


def states(used: Any) -> dict[str, Tensor]:
    """Return the optimizer's state by name."""
    state = used.optimizers[0].state_dict()["state"]
    values = {f"{key}.{name}": value for key, each in state.items() for name, value in each.items()}
    return {name: value.cpu() for name, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "step", "clip", "capture"),
    [
        *((name, 0, None, True) for name in ("sgd", "adamw")),
        *((name, 4, 0.05, True) for name in ("Nesterov", "muon")),
        ("adamw", 26, None, True),
        *((name, 9, None, False) for name in ("Nesterov", "adamw", "muon")),
    ],
)
def test_a_non_finite_loss_changes_no_weights_or_states_and_names_its_step(
    name: str, step: int, clip: float | None, capture: bool, device: Device, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"accelerator": device.accelerator, "gradient_clip_val": clip, "log_every_n_steps": 100}
    expected, model, rows = classifier(**OPTIMIZERS[name]), classifier(capture=capture, **OPTIMIZERS[name]), Rows()
    done = fitted(expected, shapes_data(), max_epochs=-1, max_steps=step, **settings)
    used = trainer(*best_and_last(tmp_path), logger=rows, max_epochs=5, **settings)
    with pytest.raises(
        NotFiniteLoss, match=rf"the loss is (nan|not finite) at step {step} of epoch {step // BATCHES}$"
    ):
        used.fit(model, datamodule=broken_data(step))
    device.assert_alike(weights(model), weights(expected), OPTIMIZERS[name])
    if step and capture and device.accelerator == "cpu":
        before = states(done)
        assert same({key: value for key, value in states(used).items() if key in before}, before)
    steps = [read_checkpoint(path)["global_step"] for path in tmp_path.iterdir()]
    assert max(steps, default=0) == step // BATCHES * BATCHES
    assert all(math.isfinite(loss) for loss in rows.curve("train/loss").values())


def test_a_late_non_finite_loss_names_its_accumulated_update() -> None:
    late = LambdaCallback(on_train_start=lambda trainer, model: setattr(model, "_reads_losses", False))
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 100}
    with pytest.raises(NotFiniteLoss, match=r"the loss is not finite at step 2 of epoch 0$"):
        fitted(classifier(), broken_data(5), late, **settings)


def test_an_eager_step_does_not_synchronise_with_the_device() -> None:
    """Meta tensors raise an error when their values are read."""
    used, model = trainer(), classifier(**{**WHITENED, "schedule": "constant"}).to("meta")
    model.trainer = used
    model.running = RunningMetrics(torch.device("meta"))
    used.strategy.optimizers = [optimizer := model.configure_optimizers()]
    model.on_fit_start()
    assert optimizer.found_inf is model.running.non_finite  # skips the update after a non-finite loss
    labels = torch.zeros(6, dtype=torch.int64, device="meta")
    model.training_step(Batch(torch.zeros(6, 3, 16, 16, device="meta"), labels, labels), 0).backward()
    optimizer.step()


@pytest.mark.usefixtures("fake_graphs")
def test_no_checkpoint_is_saved_after_a_non_finite_loss_between_two_log_lines(tmp_path: Path) -> None:
    def save_later(trainer: Any, *_: Any) -> None:
        if trainer.global_step > 1:
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    save = LambdaCallback(on_train_batch_end=save_later)
    with pytest.raises(NotFiniteLoss, match="at step 1 of epoch 0"):
        fitted(classifier(capture=True), broken_data(1), save, log_every_n_steps=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [3, 10])
def test_a_resumed_captured_run_ends_alike_and_names_a_diverged_step(stop: int, device: Device, tmp_path: Path) -> None:
    def run(data: Any, resume: Path | None = None, stop: int = -1) -> dict[str, Tensor]:
        last = best_and_last(tmp_path)[1]
        model, orderly = classifier(capture=True, momentum=0.9, schedule="one_cycle", lr=2**-6), OrderlyStop(last)
        callbacks = [RandomState(), last, stop_at(orderly, stop), orderly]
        settings: dict[str, Any] = {"max_epochs": 4, "log_every_n_steps": 3, "accelerator": device.accelerator}
        fitted(model, data, *callbacks, resume=resume, **settings)
        return weights(model)

    expected = run(shapes_data())
    with pytest.raises(Interrupted):
        run(shapes_data(), stop=stop)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    checkpoint = read_checkpoint(middle)
    assert checkpoint["global_step"] == stop
    assert all(type(group["lr"]) is float for group in checkpoint["optimizer_states"][0]["param_groups"])
    device.assert_alike(run(shapes_data(), middle), expected, {})
    with pytest.raises(NotFiniteLoss, match=r"at step 18 of epoch 2$"):
        run(broken_data(18), middle)
