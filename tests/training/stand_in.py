"""A stand-in for a device that records graphs, so that the captured path is tested where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_lit.training import cuda_graph
from cifar_lit.training.cuda_graph import GraphedSteps


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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Graphs:
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
