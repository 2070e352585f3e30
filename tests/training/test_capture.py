"""Steps that are recorded once and replayed: the same training as step by step, and the same end of a diverged one.

On a CUDA device where there is one, and everywhere with a stand-in that records.
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
def stand_in(monkeypatch: pytest.MonkeyPatch) -> recorded_graphs.Module:
    """Makes trainings of this test record their steps on the CPU."""
    module = recorded_graphs.Module()
    monkeypatch.setattr(captured, "device_graphs", lambda device: module)
    return module


class Device:
    """Where a test trains: on the CPU with a stand-in for its graphs, with the same bits, or on a CUDA device within rounding."""

    def __init__(self, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.accelerator, self.recorded = accelerator, 0
        self.rtol = 0.02 if accelerator == "gpu" else 1e-4  # of losses and rates
        step = GraphedSteps._step

        def counted(steps: GraphedSteps, batch: Any) -> Tensor:
            self.recorded -= len(steps._captured)
            loss = step(steps, batch)
            self.recorded += len(steps._captured)
            return loss

        monkeypatch.setattr(GraphedSteps, "_step", counted)

    def assert_alike(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], settings: dict[str, Any]) -> None:
        """As near as these settings allow: Muon's products are of bfloat16, and rates of a schedule are rounded to float32."""
        if self.accelerator == "gpu":
            assert_close(first, second, *((0.05, 0.02) if settings.get("optimizer") == "muon" else (1e-3, 1e-4)))
        elif "schedule" in settings:
            assert_close(first, second, 1e-4, 1e-5)
        else:
            assert same(first, second)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Without TensorFloat32, so that what is compared is not the rounding of products."""
    precision = torch.get_float32_matmul_precision()
    if request.param == "cpu":
        request.getfixturevalue("stand_in")
    elif not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    else:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        torch.set_float32_matmul_precision("highest")
    yield Device(request.param, monkeypatch)
    torch.set_float32_matmul_precision(precision)


# ---- the same training

MUON = {"optimizer": "muon", "momentum": 0.6}
WHITENED: dict[str, Any] = {
    **MUON,
    "net": "whitened",
    "net_options": {"widths": [8, 12]},
    "schedule": "triangular",
    "lr": 2**-6,
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "muon, whitening's end within an epoch": ({**WHITENED, "whiten_epochs": 2.5}, {}, {}),
    "Nesterov, clipped by norm": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {},
        {"gradient_clip_val": 0.05},
    ),
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
ROUGH = ("bfloat16",)  # on a real device


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_train_and_log_as_single_ones_do(name: str, device: Device) -> None:
    model_settings, data_settings, trainer_settings = SETTINGS[name]
    # two shapes of batches; of three sizes of images, or with the whitening's bias and without
    captured = dict.fromkeys(SETTINGS, 2) | {
        "smaller images first, norms": 6,
        "muon, whitening's end within an epoch": 4,
    }
    ends: list[Any] = []
    for capture in (False, True):
        rows, clock, model = Rows(), Clock(), classifier(**{"capture": capture, "lr": 2**-6, **model_settings})
        data = shapes_data(crop=2, flip="random", **data_settings)
        settings = {"accelerator": device.accelerator, "logger": rows, "log_every_n_steps": 4, "max_epochs": 5}
        done = fitted(model, data, clock, **settings, **trainer_settings)
        assert device.recorded == (captured[name] if capture else 0)
        ends.append((weights(model), rows.rows, done.global_step, clock.images))
    (expected, usual_rows, *counts), (state, rows, *counts_too) = ends
    assert counts_too == counts
    only_losses = device.accelerator == "gpu" and name in ROUGH
    if not only_losses:
        device.assert_alike(state, expected, model_settings)
    for (step, values), (usual_step, usual) in zip(rows, usual_rows, strict=True):
        assert step == usual_step
        for each in {"train/loss", "lr"} & usual.keys() if device.accelerator == "gpu" else usual:
            assert values[each] == pytest.approx(usual[each], rel=0.05 if only_losses else device.rtol, abs=1e-6)


def test_dropout_draws_anew_at_every_replay(device: Device) -> None:
    rows, model = Rows(), classifier(net="dropout", lr=1e-12, capture=True)
    fitted(
        model,
        shapes_data(shuffle=False),
        logger=rows,
        log_every_n_steps=7,
        accelerator=device.accelerator,
        max_epochs=4,
    )
    losses = list(rows.of("train/loss").values())
    assert len(set(losses)) == len(losses) == 4


@pytest.mark.parametrize("optimizer", ["whitened", "dropout", "adamw"])
def test_a_fit_only_replays_from_its_start_on_and_starts_as_if_nothing_had_been_captured(
    optimizer: str, stand_in: recorded_graphs.Module
) -> None:
    settings = {
        "whitened": {**WHITENED, "whiten_epochs": 1.5},
        "dropout": {"net": "dropout"},
        "adamw": {"optimizer": "adamw"},
    }
    starts: list[Any] = []

    def start(trainer: Any, model: Any) -> None:
        state = states(trainer)
        assert not any(value.any() for value in state.values())
        running = [tensor.clone() for tensor in model.running.tensors]
        starts.append((weights(model), torch.get_rng_state(), running, stand_in.captures, stand_in.replays))

    for capture in (False, True):
        data = shapes_data(resolutions={8: 0.5} if optimizer == "whitened" else None)
        done = fitted(
            classifier(capture=capture, **settings[optimizer]), data, LambdaCallback(on_train_start=start), max_epochs=4
        )
    (expected, random, running, *_), (state, random_too, running_too, captures, replays) = starts
    assert same(state, expected) and torch.equal(random, random_too)
    assert all(torch.equal(one, other) for one, other in zip(running, running_too, strict=True))
    # two sizes of batch; of the whitened net on two sizes of images, the first with a bias to train and with a final one
    assert captures == stand_in.captures == (6 if optimizer == "whitened" else 2)
    assert stand_in.replays - replays == done.global_step == 4 * BATCHES


class Hooked(Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


def test_a_fit_captures_on_one_stream_into_one_pool_where_it_can(stand_in: recorded_graphs.Module) -> None:
    """Memory that another stream freed could not be used again; and a pool that outlives its graphs breaks the next capture."""
    assert device_graphs(torch.device("cpu")) is None
    fitted(classifier(capture=True), shapes_data(), Hooked(), max_epochs=4)
    fitted(classifier(capture=True), shapes_data(), max_epochs=4, accumulate_grad_batches=2)
    assert not stand_in.captures
    model = classifier(capture=True)
    for fits in (1, 2):
        fitted(model, shapes_data(), max_epochs=4)
        assert (len(stand_in.streams), len(stand_in.pools)) == (fits, fits)


def test_graphs_end_with_their_fit_and_not_at_some_collection(stand_in: recorded_graphs.Module) -> None:
    """A pool is given back then; and from torch 2.12 to 2.14 a graph that dies during the next fit takes its workspace along."""
    gc.disable()
    try:
        model = classifier(capture=True)
        fitted(model, shapes_data())
        assert stand_in.captures == 2 and not stand_in.graphs
        used, failed = trainer(), classifier(capture=True)
        with pytest.raises(NotFiniteLoss):
            used.fit(failed, datamodule=broken_data(5))
        assert stand_in.captures == 4 and not stand_in.graphs
        fitted(model, shapes_data())
    finally:
        gc.enable()


# ---- a loss that is not finite


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 2**-6},
    "Nesterov": {"lr": 2**-6, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "muon": {"lr": 2**-6, **MUON},
    "adamw": {"optimizer": "adamw", "lr": 2**-7, "weight_decay": 0.1},
}


def states(used: Any) -> dict[str, Tensor]:
    """An optimizer's state by name."""
    state = used.optimizers[0].state_dict()["state"]
    return {
        f"{key}.{name}": value.cpu() for key, each in state.items() for name, value in each.items() if value is not None
    }


@pytest.mark.parametrize(
    ("name", "step", "clip", "capture"),
    [
        *((name, 0, None, True) for name in ("sgd", "adamw")),
        *((name, 4, 0.05, True) for name in ("Nesterov", "muon")),
        ("adamw", 26, None, True),
        *((name, 9, None, False) for name in ("Nesterov", "adamw", "muon")),
    ],
)
def test_a_loss_that_is_not_finite_leaves_weights_and_states_as_they_were_and_names_its_step(
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
    assert all(math.isfinite(loss) for loss in rows.of("train/loss").values())


def test_a_loss_that_is_read_late_is_named_by_its_update_where_batches_are_gathered() -> None:
    late = LambdaCallback(on_train_start=lambda trainer, model: setattr(model, "_reads_losses", False))
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 100}
    with pytest.raises(NotFiniteLoss, match=r"the loss is not finite at step 2 of epoch 0$"):
        fitted(classifier(), broken_data(5), late, **settings)


def test_a_step_that_is_not_captured_does_not_wait_for_another_device_than_a_cpu() -> None:
    """Tensors without content refuse every question about their values."""
    used, model = trainer(), classifier(**{**WHITENED, "schedule": "constant"}).to("meta")
    model.trainer = used
    model.running = RunningMetrics(torch.device("meta"))
    used.strategy.optimizers = [optimizer := model.configure_optimizers()]
    model.on_fit_start()
    assert optimizer.found_inf is model.running.non_finite  # which keeps a loss that is not finite from the weights
    labels = torch.zeros(6, dtype=torch.int64, device="meta")
    model.training_step(Batch(torch.zeros(6, 3, 16, 16, device="meta"), labels, labels), 0).backward()
    optimizer.step()


@pytest.mark.usefixtures("stand_in")
def test_a_checkpoint_asked_for_between_log_lines_is_refused_when_the_loss_was_not_finite(tmp_path: Path) -> None:
    save = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: (
            trainer.save_checkpoint(tmp_path / "own.ckpt") if trainer.global_step > 1 else None
        )
    )
    with pytest.raises(NotFiniteLoss, match="at step 1 of epoch 0"):
        fitted(classifier(capture=True), broken_data(1), save, log_every_n_steps=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [3, 10])
def test_a_resumed_recorded_training_ends_alike_and_names_the_step_at_which_it_diverges(
    stop: int, device: Device, tmp_path: Path
) -> None:
    def run(data: Any, resume: Path | None = None, stop: int = -1) -> dict[str, Tensor]:
        last = best_and_last(tmp_path)[1]
        model, orderly = classifier(capture=True, momentum=0.9, schedule="one_cycle", lr=2**-6), OrderlyStop(last)
        callbacks = [RandomState(), last, stop_at(orderly, stop), orderly]
        fitted(
            model, data, *callbacks, resume=resume, max_epochs=4, log_every_n_steps=3, accelerator=device.accelerator
        )
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
