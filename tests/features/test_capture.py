"""Captured steps train like eager ones, and end a diverged training at the same step.

The tests run on the CPU with fake graphs, and on a CUDA device if there is one.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_graphs
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, LambdaCallback
from small_runs import (
    BATCHES,
    MOMENTUM,
    Rows,
    assert_close,
    best_and_last,
    broken_data,
    classifier,
    features,
    fitted,
    float16,
    same,
    shapes_data,
    stop_at,
    trainer,
    weights,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cifar_lit.data.augment import Augment
from cifar_lit.data.batch import Batch
from cifar_lit.data.datamodule import ImageData
from cifar_lit.features import FEATURES
from cifar_lit.features.capture import Capture, GraphedSteps, device_graphs
from cifar_lit.features.whitening import Whitening
from cifar_lit.training.callbacks import Clock, RandomState
from cifar_lit.training.checkpoint import LastCheckpoint, read_checkpoint
from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import RunningMetrics
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop

pytestmark = pytest.mark.usefixtures("dropout_net")


State = Mapping[str, Tensor]


def nudged(model: ImageClassifier, seed: int = 1) -> ImageClassifier:
    """Change each initial weight by about its rounding error, and return the model. Seed 0 changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + bool(seed) * 2**-22 * torch.randn(parameter.shape, generator=generator))
    return model


def mean_difference(first: State, second: State) -> float:
    differences = [(first[name].float() - second[name].float()).abs().ravel() for name in second]
    return float(torch.cat(differences).mean())


def assert_rounded_alike(actual: State, expected: State, rounded: State) -> None:
    """Assert that `actual` differs from `expected` by rounding, as `rounded` does: the run with `nudged` weights.

    A tolerance per weight would not do: rounding changes single weights of AdamW by its rate, and all weights of Muon.
    The floor covers a ReLU or a pooling that rounding turns over in one of the runs only.
    """
    assert mean_difference(actual, expected) <= 10 * mean_difference(rounded, expected) + 5e-6


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

    def assert_alike(self, first: State, second: State, settings: Any, rounded: Callable[[], State]) -> None:
        """Compare up to rounding: schedules round rates to float32. rounded: repeats the second run, `nudged`."""
        if self.accelerator == "gpu":
            assert_rounded_alike(first, second, rounded())
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

MUON = {"optimizer": "muon", "optimizer_options": {"momentum": 0.6}}
NET = {"net": "whitened", "net_options": {"widths": [8, 12]}}
WHITENED: dict[str, Any] = {**MUON, **NET, "schedule": "triangular", "lr": 2**-6}
NESTEROV = {"optimizer_options": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}}
# A higher rate would let one rounded weight change all others within a few steps.
ADAMW = {"optimizer": "adamw", "lr": 2**-12, "optimizer_options": {"weight_decay": 0.1}}
BFLOAT16 = {"precision": "bf16-mixed"}
# Settings of the model and its features, augmentation, settings of the Trainer.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "muon, whitening's end within an epoch": ({**WHITENED, "whitening": {"bias_epochs": 2.5}}, {}, {}),
    "Nesterov, clipped by norm": (NESTEROV, {}, {"gradient_clip_val": 0.05}),
    "clipped by value": ({"label_smoothing": 0.1}, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "adamw": (ADAMW, {}, {"gradient_clip_val": 0.05}),
    "smaller images first, norms": ({"net": "shapenet", "resolutions": {"sides": {8: 0.4, 12: 0.2}}}, {}, {}),
    "without the easy images": ({**MOMENTUM, "skip_easy": {"share": 0.5, "start": 0.1}}, {}, {}),
    "class weights": ({**MOMENTUM, "class_weights": {}}, {}, {}),
    "bfloat16": (MOMENTUM, {}, BFLOAT16),
    "smaller images in bfloat16": ({"net": "shapenet", "resolutions": {"sides": {8: 0.4}}}, {}, BFLOAT16),
    "mixed images": ({"label_smoothing": 0.1}, {"brightness": 0.4, "mixup": 0.4, "cutmix": 1.0}, {}),
    "an average, a schedule by the step": ({"schedule": "one_cycle", "weight_average": {"decay": 0.9}}, {}, {}),
    "a schedule by the epoch": ({"schedule": "cosine", "schedule_options": {"every": "epoch"}}, {}, {}),
}


def parts(capture: bool, settings: Mapping[str, Any]) -> tuple[ImageClassifier, list[Callback]]:
    """Return a model and its features, with `Capture` if its steps are captured."""
    captures: list[Callback] = [Capture(compile=False)] if capture else []
    own = {name: value for name, value in settings.items() if name not in FEATURES}
    return classifier(**own), [*features(settings), *captures]


@pytest.mark.parametrize("name", SETTINGS)
def test_captured_steps_train_and_log_like_eager_steps(name: str, device: Device) -> None:
    model_settings, augment, trainer_settings = SETTINGS[name]
    # One graph per batch size (two), times three image sizes, or with and without a gradient of the whitening bias.
    several = {"smaller images first, norms": 6, "muon, whitening's end within an epoch": 4}
    captures = {**several, "smaller images in bfloat16": 4}.get(name, 2)

    def run(capture: bool, seed: int = 0) -> Any:
        rows, clock = Rows(), Clock()
        model, added = parts(capture, {"lr": 2**-6, **model_settings})
        data = shapes_data(augment={"crop": 2, "flip": "random", **augment})
        settings = {"accelerator": device.accelerator, "logger": rows, "log_every_n_steps": 4, "max_epochs": 5}
        done = fitted(nudged(model, seed), data, *added, clock, **settings, **trainer_settings)
        return weights(model), rows.rows, done.global_step, clock.images

    expected, eager_rows, *eager_counts = run(capture=False)
    assert device.captures == 0
    state, rows, *counts = run(capture=True)
    assert device.captures == captures
    assert counts == eager_counts
    only_losses = device.accelerator == "gpu" and "bfloat16" in name
    if not only_losses:
        device.assert_alike(state, expected, model_settings, lambda: run(capture=False, seed=1)[0])
    for (step, values), (eager_step, eager) in zip(rows, eager_rows, strict=True):
        assert step == eager_step
        for each in {"train/loss", "lr"} & eager.keys() if device.accelerator == "gpu" else eager:
            assert values[each] == pytest.approx(eager[each], rel=0.05 if only_losses else device.rtol, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "captures"),
    [
        ({}, True),
        ({"world_size": 2}, False),
        ({"accumulate_grad_batches": 2}, False),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, False),
        ({"callbacks": [LambdaCallback(on_before_optimizer_step=print)]}, False),
        ({"callbacks": [LambdaCallback(on_train_epoch_end=print)]}, True),
    ],
)
@pytest.mark.usefixtures("fake_graphs")
def test_steps_are_captured_only_if_one_device_takes_them_without_other_code(
    settings: dict[str, Any], captures: bool
) -> None:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = {"strategy": strategy, "world_size": 1, "accumulate_grad_batches": 1, "callbacks": [], **settings}
    assert Capture().captures(SimpleNamespace(**trainer)) == captures


def run_in_float16(
    folder: Path, capture: bool, settings: Any, scale: float = 2.0**26, resume: Path | None = None, stop: int = -1
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train in float16; return the weights and the state of the scaler, which changes every few steps."""
    model, added = parts(capture, {"net": "signs_mlp", **settings})
    last = best_and_last(folder)[1]
    orderly = OrderlyStop(last)
    scaled = float16(init_scale=scale, growth_interval=5)
    callbacks = [*added, RandomState(), last, stop_at(orderly, stop), orderly]
    done = fitted(model, shapes_data(), *callbacks, resume=resume, max_epochs=4, gradient_clip_val=0.05, **scaled)
    return weights(model), done.precision_plugin.state_dict()


@pytest.mark.parametrize("name", ["Nesterov", "muon", "adamw"])
def test_captured_steps_in_float16_skip_and_scale_like_eager_steps(
    name: str, fake_graphs: recorded_graphs.Module, tmp_path: Path
) -> None:
    settings = {**OPTIMIZERS[name], "schedule": "triangular"}
    eager, eager_scaler = run_in_float16(tmp_path / "eager", False, settings)
    state, scaler = run_in_float16(tmp_path / "captured", True, settings)
    assert fake_graphs.captures == 2
    assert_close(state, eager, 1e-4, 1e-5)
    assert scaler == eager_scaler and scaler["scale"] < 2.0**26


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.usefixtures("fake_graphs")
def test_a_resumed_float16_run_continues_with_its_loss_scale(capture: bool, tmp_path: Path) -> None:
    settings = OPTIMIZERS["Nesterov"]
    expected, scaler = run_in_float16(tmp_path, capture, settings)
    with pytest.raises(Interrupted):
        run_in_float16(tmp_path, capture, settings, stop=10)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    state, resumed = run_in_float16(tmp_path, capture, settings, scale=2.0**10, resume=middle)
    assert same(state, expected) and resumed == scaler


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.usefixtures("fake_graphs")
def test_in_float16_a_non_finite_loss_ends_the_run_and_names_its_step(capture: bool, tmp_path: Path) -> None:
    model, added = parts(capture, {"net": "signs_mlp"})
    used = trainer(*added, *best_and_last(tmp_path), **float16())
    with pytest.raises(NotFiniteLoss, match=r"at step 9 of epoch 1$"):
        used.fit(model, datamodule=broken_data(9))
    assert {read_checkpoint(path)["global_step"] for path in tmp_path.iterdir()} == {BATCHES}


def test_dropout_draws_new_numbers_at_every_replay(device: Device) -> None:
    rows, model = Rows(), classifier(net="dropout", lr=1e-12)
    settings: dict[str, Any] = {"log_every_n_steps": 7, "accelerator": device.accelerator, "max_epochs": 4}
    fitted(model, shapes_data(shuffle=False), Capture(compile=False), logger=rows, **settings)
    losses = list(rows.curve("train/loss").values())
    assert len(set(losses)) == len(losses) == 4


def test_pairs_of_a_plain_loader_are_captured_and_train_like_eager_steps(device: Device) -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(40, 3, 16, 16, generator=generator), torch.arange(40) % 10

    def trained(capture: bool) -> State:
        model, added = parts(capture, {})
        loader = DataLoader(TensorDataset(images, labels), batch_size=16)  # the last batch is smaller
        trainer(*added, max_epochs=6, accelerator=device.accelerator).fit(model, loader)
        return weights(model)

    assert device.captures == 0
    captured = trained(True)
    assert device.captures == 2
    assert_close(captured, trained(False), 1e-4, 1e-5)


SIZED = {**WHITENED, "whitening": {"bias_epochs": 1.5}, "resolutions": {"sides": {8: 0.5}}}


@pytest.mark.parametrize("settings", [SIZED, {"net": "dropout"}, {"optimizer": "adamw"}], ids=str)
def test_captures_come_first_and_leave_no_trace(settings: dict[str, Any], fake_graphs: recorded_graphs.Module) -> None:
    whitened = "whitening" in settings
    starts: list[Any] = []

    def note_start(trainer: Any, model: Any) -> None:
        state = states(trainer)
        assert not any(value.any() for value in state.values())
        running = [tensor.clone() for tensor in model.running.tensors]
        starts.append((weights(model), torch.get_rng_state(), running, fake_graphs.captures, fake_graphs.replays))

    for capture in (False, True):
        model, added = parts(capture, settings)
        done = fitted(model, shapes_data(), *added, LambdaCallback(on_train_start=note_start), max_epochs=4)
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
    fitted(classifier(), shapes_data(), Capture(), Hooked(), max_epochs=4)
    fitted(classifier(), shapes_data(), Capture(), max_epochs=4, accumulate_grad_batches=2)
    assert not fake_graphs.captures
    model, capture = classifier(), Capture(compile=False)
    for fits in (1, 2):
        fitted(model, shapes_data(), capture, max_epochs=4)
        assert (len(fake_graphs.streams), len(fake_graphs.pools)) == (fits, fits)


def test_graphs_are_freed_at_the_end_of_the_fit_without_garbage_collection(fake_graphs: recorded_graphs.Module) -> None:
    """In torch 2.12 to 2.14 a graph that dies during the next fit frees the workspace of that fit."""
    gc.disable()
    try:
        model, capture = classifier(), Capture(compile=False)
        fitted(model, shapes_data(), capture)
        assert fake_graphs.captures == 2 and not fake_graphs.graphs
        used, failed = trainer(Capture(compile=False)), classifier()
        with pytest.raises(NotFiniteLoss):
            used.fit(failed, datamodule=broken_data(5))
        assert fake_graphs.captures == 4 and not fake_graphs.graphs
        fitted(model, shapes_data(), capture)
    finally:
        gc.enable()


def test_a_replay_crops_and_normalises_unless_this_depends_on_the_epoch_or_on_code_of_the_user(
    fake_graphs: recorded_graphs.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    move = Augment.move

    def counted(augment: Augment, images: Tensor, rows: Tensor, *args: Any) -> Tensor:
        calls.append(len(rows))
        return move(augment, images, rows, *args)

    monkeypatch.setattr(Augment, "move", counted)

    def calls_in(epochs: int, data: ImageData) -> int:
        calls.clear()
        fitted(classifier(), data, Capture(compile=False), max_epochs=epochs)
        return len(calls)

    moves = {"crop": 2, "flip": "random"}
    # Each size of batch is made in three warm-ups and in the capture.
    assert calls_in(2, shapes_data(augment=moves)) == calls_in(5, shapes_data(augment=moves)) == 8
    for make in (partial(shapes_data, augment={**moves, "brightness": 0.4}), partial(broken_data, 999, augment=moves)):
        assert calls_in(2, make()) < calls_in(5, make())
    assert fake_graphs.captures == 12


class Inverting(ImageData):
    """Inverts images before they move to the device."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return replace(batch, images=255 - batch.images)


class InvertingClassifier(ImageClassifier):
    """Inverts images while they move to the device."""

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return replace(batch, images=255 - batch.images)


def darken(trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
    batch.images.mul_(0.5)


def relabel(trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
    batch.labels.copy_(batch.labels.flip(0))


@pytest.mark.parametrize("change", [Inverting, InvertingClassifier, darken, relabel])
def test_captured_steps_train_on_batches_that_code_of_the_user_changes(
    change: Any, fake_graphs: recorded_graphs.Module
) -> None:
    def run(capture: bool, changed: bool = True) -> State:
        data, (model, callbacks) = shapes_data(augment={"crop": 2}), parts(capture, {})
        if changed and isinstance(change, type):
            owner: Any = data if issubclass(change, ImageData) else model
            owner.__class__ = change
        elif changed:
            callbacks.append(LambdaCallback(on_train_batch_start=change))
        fitted(model, data, *callbacks)
        return weights(model)

    expected = run(capture=False)
    assert same(run(capture=True), expected)
    assert fake_graphs.captures
    assert not same(run(capture=False, changed=False), expected)


def test_a_net_that_the_compiler_refuses_trains_uncompiled_with_one_message(
    fake_graphs: recorded_graphs.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C compiler found\nand more")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refuse))
    torch.compiler.reset()
    model, expected = classifier(**NET), classifier(**NET)
    fitted(model, shapes_data(), Whitening(), Capture())
    assert fake_graphs.captures == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "compile" in line)
    assert line.startswith("the net is not compiled, because the compiler failed (")
    assert "no C compiler found" in line and line.endswith("): add --capture.compile false")
    fitted(expected, shapes_data(), Whitening(), Capture(compile=False))
    assert same(weights(model), weights(expected))


@pytest.mark.parametrize("reason", ["a CPU", "a callback within the step"])
def test_a_net_is_not_compiled_if_its_steps_are_not_captured(
    reason: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `compile: true` of a recipe costs no time on a CPU."""
    if reason != "a CPU":
        request.getfixturevalue("fake_graphs")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("the net is compiled"))
    callbacks = [Hooked()] if reason == "a callback within the step" else []
    fitted(classifier(), shapes_data(), Capture(), *callbacks, max_epochs=1)


# ---- a loss that is not finite


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 2**-6},
    "Nesterov": {"lr": 2**-6, **NESTEROV},
    "muon": {"lr": 2**-6, **MUON},
    "adamw": ADAMW,
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
    name: str, step: int, clip: float | None, capture: bool, device: Device, tmp_path: Path, monkeypatch: Any
) -> None:
    settings: dict[str, Any] = {"accelerator": device.accelerator, "gradient_clip_val": clip, "log_every_n_steps": 100}
    limits: dict[str, Any] = {"max_epochs": -1, "max_steps": step}
    monkeypatch.setattr(LastCheckpoint, "MIN_INTERVAL", 0.0)
    (model, added), rows = parts(capture, OPTIMIZERS[name]), Rows()

    def expect(seed: int) -> tuple[State, State]:
        done = fitted(expected := nudged(classifier(**OPTIMIZERS[name]), seed), shapes_data(), **limits, **settings)
        return weights(expected), states(done)

    expected, expected_states = expect(seed=0)
    used = trainer(*added, *best_and_last(tmp_path), logger=rows, max_epochs=5, **settings)
    with pytest.raises(
        NotFiniteLoss, match=rf"the loss is (nan|not finite) at step {step} of epoch {step // BATCHES}$"
    ):
        used.fit(model, datamodule=broken_data(step))
    device.assert_alike(weights(model), expected, OPTIMIZERS[name], lambda: expect(seed=1)[0])
    if step and capture and device.accelerator == "cpu":
        assert same({key: value for key, value in states(used).items() if key in expected_states}, expected_states)
    steps = [read_checkpoint(path)["global_step"] for path in tmp_path.iterdir()]
    assert max(steps, default=0) == step // BATCHES * BATCHES
    assert all(math.isfinite(loss) for loss in rows.curve("train/loss").values())


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
        fitted(classifier(), broken_data(1), Capture(compile=False), save, log_every_n_steps=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [3, 10])
def test_a_resumed_captured_run_ends_alike_and_names_a_diverged_step(stop: int, device: Device, tmp_path: Path) -> None:
    def run(data: Any, resume: Path | None = None, stop: int = -1, seed: int = 0) -> State:
        last = best_and_last(tmp_path)[1]
        model, orderly = classifier(schedule="one_cycle", lr=2**-6, **MOMENTUM), OrderlyStop(last)
        callbacks = [Capture(compile=False), RandomState(), last, stop_at(orderly, stop), orderly]
        settings: dict[str, Any] = {"max_epochs": 4, "log_every_n_steps": 3, "accelerator": device.accelerator}
        fitted(nudged(model, seed), data, *callbacks, resume=resume, **settings)
        return weights(model)

    expected = run(shapes_data())
    with pytest.raises(Interrupted):
        run(shapes_data(), stop=stop)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    checkpoint = read_checkpoint(middle)
    assert checkpoint["global_step"] == stop
    assert all(type(group["lr"]) is float for group in checkpoint["optimizer_states"][0]["param_groups"])
    device.assert_alike(run(shapes_data(), middle), expected, {}, lambda: run(shapes_data(), seed=1))
    with pytest.raises(NotFiniteLoss, match=r"at step 18 of epoch 2$"):
        run(broken_data(18), middle)
