"""Steps that are recorded once and replayed: the same training as step by step, and the same end of a diverged one.

A stand-in records them, so that the captured path is tested where no device does.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from small_runs import (
    BATCHES,
    Rows,
    assert_close,
    best_and_last,
    broken_data,
    classifier,
    distance,
    fitted,
    same,
    shapes_data,
    stop_at,
    trainer,
    weights,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_lit.training import cuda_graph
from cifar_lit.training.callbacks import Clock, Interrupted, NotFiniteLoss, OrderlyStop
from cifar_lit.training.checkpoint import read_checkpoint
from cifar_lit.training.cuda_graph import WARM_UP_STEPS, GraphedSteps, device_graphs

pytestmark = pytest.mark.usefixtures("dropout_net")


class Stream:
    """A stream that is always ready."""

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)


class NoLooks(TorchDispatchMode):
    """Refuses what a device cannot record: the host's looks at values, and what has a size that follows from values."""

    SYNCHRONISES = ("_local_scalar_dense", "nonzero")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in self.SYNCHRONISES, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


class Graph:
    """A graph that "records" by keeping the step, which each replay runs again on the tensors of the first time.

    As in a real graph, what was a plain number in an optimizer's settings stays at what it was when it was recorded, where
    a tensor is read anew.
    """

    def __init__(self, owner: "Graphs") -> None:
        self._owner = owner
        self.run: Any = None

    def replay(self) -> None:
        self._owner.replays += 1
        groups = self._owner.groups()
        now = [{name: group[name] for name in numbers} for group, numbers in zip(groups, self.frozen, strict=True)]
        for group, numbers in zip(groups, self.frozen, strict=True):
            group.update(numbers)
        with NoLooks():
            self.loss.copy_(self.run())
        for group, numbers in zip(groups, now, strict=True):
            group.update(numbers)

    def record(self, run: Any, loss: Tensor) -> None:
        self._owner.recorded += 1
        self.run, self.loss = run, loss
        self.frozen = [
            {name: value for name, value in group.items() if isinstance(value, float)} for group in self._owner.groups()
        ]


class Graphs(Callback):
    """What a device's module offers for graphs. As a callback of the fit it learns of the optimizers."""

    Stream = Stream
    current_stream = Stream

    def __init__(self) -> None:
        self.recorded, self.replays, self.streams, self.pools = 0, 0, set[Stream](), set[object]()
        self.recording: Graph | None = None
        self._optimizers: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._optimizers = trainer.optimizers

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def graph_pool_handle(self) -> object:
        return object()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.streams.add(stream)
        yield

    @contextmanager
    def graph(self, graph: Graph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # or a thread that pins memory spoils the capture
        self.streams.add(stream)
        self.pools.add(pool)
        self.recording = graph
        try:
            yield
        finally:
            self.recording = None

    def rates_are_tensors(self) -> bool:
        """Whether a graph would read every rate anew."""
        return all(isinstance(group["lr"], Tensor) for group in self.groups())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Makes trainings in this test record their steps; the graphs are to be given to the fit as a callback too."""
    graphs = Graphs()
    run = GraphedSteps._run

    def recorded(self: GraphedSteps, batch: Any) -> Tensor:
        """While a graph is recorded, launches nothing, and hands out the place that its loss will be written to."""
        if graphs.recording is None:
            return run(self, batch)
        loss = batch.images.new_zeros(())
        graphs.recording.record(lambda: run(self, batch), loss)
        return loss

    monkeypatch.setattr(cuda_graph, "device_graphs", lambda device: graphs)
    monkeypatch.setattr(GraphedSteps, "_run", recorded)
    return graphs


# ---- the same training


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "muon": ({"optimizer": "muon", "momentum": 0.6, "schedule": "triangular"}, {}, {}),
    "Nesterov, clipped by norm": ({"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}, {}, {"gradient_clip_val": 0.05}),
    "clipped by value": ({"label_smoothing": 0.1}, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "adamw": ({"optimizer": "adamw", "lr": 2**-7, "weight_decay": 0.1}, {}, {"gradient_clip_val": 0.05}),
    "smaller images first, norms and dropout": ({"net": "dropout", "momentum": 0.9}, {"resolutions": {8: 0.4, 12: 0.2}}, {}),
    "bfloat16": ({"momentum": 0.9}, {}, {"precision": "bf16-mixed"}),
    "an average, a schedule by the step": ({"momentum": 0.9, "schedule": "one_cycle", "ema_decay": 0.9}, {}, {}),
    "a schedule by the epoch": ({"schedule": "cosine", "schedule_every": "epoch"}, {}, {}),
}


def outcome(name: str, *more: Callback, capture: bool) -> tuple[Any, ...]:
    model_settings, data_settings, settings = SETTINGS[name]
    rows, clock, model = Rows(), Clock(), classifier(**{"capture": capture, "lr": 2**-4, **model_settings})
    data = shapes_data(crop=2, flip="random", **data_settings)
    done = fitted(model, data, clock, *more, **{"logger": rows, "log_every_n_steps": 4, "max_epochs": 5, **settings})
    return weights(model), rows.rows, done.global_step, clock.images


@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_steps_train_and_log_as_single_ones_do(name: str, graphs: Graphs) -> None:
    """To the last bit at a constant rate; else rates, which are float32 tensors there, are rounded."""
    expected, rows, *counted = outcome(name, graphs, capture=False)
    assert graphs.recorded == 0
    found, rows_too, *counted_too = outcome(name, graphs, capture=True)
    assert graphs.rates_are_tensors()
    assert counted_too == counted
    if "schedule" not in SETTINGS[name][0]:
        assert same(found, expected)
        assert rows_too == rows
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for (step, values), (usual_step, usual) in zip(rows_too, rows, strict=True):
        assert (step, values) == (usual_step, pytest.approx(usual, rel=1e-4, abs=1e-8))
    if "resolutions" in SETTINGS[name][1]:  # 2 + 1 + 2 epochs; only the full batches come often enough
        assert graphs.recorded == 3
        assert graphs.replays == 2 * 6 + 6 + 2 * 6 - 3 * WARM_UP_STEPS
    else:  # the batches of 16, and in the fourth epoch those of 4
        assert graphs.recorded == 2
        assert graphs.replays == 5 * BATCHES - 2 * WARM_UP_STEPS


def test_a_number_that_a_graph_would_have_frozen_is_found_by_the_stand_in(graphs: Graphs) -> None:
    class Numbers(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = float(group["lr"])

    expected, *_ = outcome("an average, a schedule by the step", capture=False)
    found, *_ = outcome("an average, a schedule by the step", Numbers(), graphs, capture=True)
    assert not graphs.rates_are_tensors()
    assert distance(found, expected) > 1e-3


class Hooked(Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


@pytest.mark.parametrize(
    ("callbacks", "settings"), [([Hooked()], {}), ([], {"accumulate_grad_batches": 2})], ids=["hooks", "accumulation"]
)
def test_what_a_recorded_step_cannot_do_is_done_step_by_step(callbacks: list[Any], settings: Any, graphs: Graphs) -> None:
    fitted(classifier(capture=True), shapes_data(), graphs, *callbacks, **settings)
    assert graphs.recorded == 0


def test_without_a_device_that_records_nothing_is_recorded() -> None:
    assert device_graphs(torch.device("cpu")) is None


def test_a_fit_records_on_one_stream_into_one_pool_and_lets_go_of_both_at_its_end(graphs: Graphs) -> None:
    """Memory that another stream freed could not be used again; and a pool that outlives its graphs breaks the next capture."""
    model = classifier(capture=True)
    for fits in (1, 2):
        fitted(model, shapes_data(), graphs, max_epochs=4)
        assert (len(graphs.streams), len(graphs.pools), graphs.recorded) == (fits, fits, 2 * fits)
        assert model._graphs is None


# ---- a loss that is not finite


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 2**-4},
    "momentum": {"lr": 2**-4, "momentum": 0.9},
    "Nesterov": {"lr": 2**-4, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "muon": {"lr": 2**-4, "optimizer": "muon", "momentum": 0.6},
    "adamw": {"optimizer": "adamw", "lr": 2**-7, "weight_decay": 0.1},
}


@pytest.mark.parametrize(
    ("name", "step", "clip", "capture"),
    [
        *((name, 0, None, True) for name in ("sgd", "adamw", "muon")),
        *((name, 4, 0.05, True) for name in ("momentum", "muon")),
        *((name, 9, None, True) for name in ("Nesterov", "adamw", "muon")),
        *((name, 26, 0.05, True) for name in ("momentum", "adamw")),
        *((name, 9, None, False) for name in ("Nesterov", "adamw", "muon")),
    ],
)
def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_were_and_names_its_step(
    name: str, step: int, clip: float | None, capture: bool, graphs: Graphs, tmp_path: Path
) -> None:
    expected = classifier(capture=False, **OPTIMIZERS[name])
    settings: dict[str, Any] = {"gradient_clip_val": clip, "max_epochs": 5, "log_every_n_steps": 100}
    done = fitted(expected, shapes_data(), **{**settings, "max_epochs": -1}, max_steps=step)
    rows, model = Rows(), classifier(capture=capture, **OPTIMIZERS[name])
    used = trainer(graphs, *best_and_last(tmp_path), enable_checkpointing=True, logger=rows, **settings)
    with pytest.raises(NotFiniteLoss, match=rf"the loss is (nan|not finite) at step {step} of epoch {step // BATCHES}$"):
        used.fit(model, datamodule=broken_data(step))
    assert same(weights(model), weights(expected))
    if step and capture:
        states, before = (each.optimizers[0].state_dict()["state"] for each in (used, done))
        for number, state in before.items():
            assert all(torch.equal(states[number][name], value) for name, value in state.items() if value is not None)
    for path in tmp_path.iterdir():
        assert read_checkpoint(path)["global_step"] <= step // BATCHES * BATCHES
    assert all(math.isfinite(loss) for loss in rows.of("train/loss").values())


def test_a_checkpoint_asked_for_between_log_lines_is_refused_when_the_loss_was_not_finite(graphs: Graphs, tmp_path: Path) -> None:
    save = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(tmp_path / "own.ckpt") if trainer.global_step > 1 else None
    )
    with pytest.raises(NotFiniteLoss, match="at step 1 of epoch 0"):
        fitted(classifier(capture=True), broken_data(1), graphs, save, log_every_n_steps=100)
    assert not list(tmp_path.iterdir())


def test_a_resumed_recorded_training_ends_alike_and_names_the_step_at_which_it_diverges(graphs: Graphs, tmp_path: Path) -> None:
    def run(data: Any, resume: Path | None = None, stop: int = -1) -> Any:
        _, last = best_and_last(tmp_path)
        model, orderly = classifier(capture=True, momentum=0.9), OrderlyStop(last)
        callbacks = [graphs, last, stop_at(orderly, stop), orderly]
        fitted(model, data, *callbacks, resume=resume, enable_checkpointing=True, max_epochs=4, log_every_n_steps=3)
        return weights(model)

    expected = run(shapes_data())
    with pytest.raises(Interrupted):
        run(shapes_data(), stop=10)
    middle = (tmp_path / "last.ckpt").rename(tmp_path / "middle.ckpt")
    assert read_checkpoint(middle)["global_step"] == 10
    assert same(run(shapes_data(), middle), expected)
    with pytest.raises(NotFiniteLoss, match=r"at step 18 of epoch 2$"):
        run(broken_data(18), middle)


def test_a_look_at_a_value_is_found_by_the_stand_in(graphs: Graphs) -> None:
    for look in (lambda: torch.ones(1).item(), lambda: bool(torch.ones(1) > 0), lambda: torch.ones(3).nonzero()):
        graph = graphs.CUDAGraph()
        graph.record(look, torch.zeros(()))
        with pytest.raises(AssertionError, match="waits for the device"):
            graph.replay()
