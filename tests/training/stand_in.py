"""A stand-in for a device that records graphs, so that the captured path is tested where there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_lit.training import classifier, step
from cifar_lit.training import cuda_graph as capture


class Stream:
    """A stream that is always ready."""

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)


class NoLooks(TorchDispatchMode):
    """Refuses what a device cannot record: the host's looks at values, and what has a size that follows from values."""

    SYNCHRONISES = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket not in self.SYNCHRONISES, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


class Graphs(Callback):
    """What a device's module offers for graphs. As a callback of the fit it learns of the optimizers.

    "Recording" keeps the function, to be called at each replay. As in a real graph, what was a plain number in an
    optimizer's settings stays at what it was when it was recorded, where a tensor is read anew.
    """

    CUDAGraph = None

    def __init__(self) -> None:
        self.recorded, self.replays = 0, 0
        self._optimizers: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._optimizers = trainer.optimizers

    Stream = Stream
    current_stream = Stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, Stream)
        yield

    def graph_pool_handle(self) -> object:
        return object()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def capture(self, module: Any, function: Callable[[], None], pool: Any) -> Callable[[], None]:
        """Stands in for `capture.capture`."""
        assert module is self and pool is not None and self._optimizers
        self.recorded += 1
        frozen = [{name: value for name, value in group.items() if isinstance(value, float)} for group in self._groups()]

        def replay() -> None:
            self.replays += 1
            groups = self._groups()
            now = [{name: group[name] for name in numbers} for group, numbers in zip(groups, frozen, strict=True)]
            for group, numbers in zip(groups, frozen, strict=True):
                group.update(numbers)
            with NoLooks():
                function()
            for group, numbers in zip(groups, now, strict=True):
                group.update(numbers)

        return replay

    def rates_are_tensors(self) -> bool:
        """Whether a graph would read every rate anew."""
        return all(isinstance(group["lr"], Tensor) for group in self._groups())


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Makes trainings in this test record their steps; the graphs are to be given to the fit as a callback too."""
    graphs = Graphs()
    for module in (capture, step, classifier):
        monkeypatch.setattr(module, "graphs_of", lambda device: graphs, raising=False)
    monkeypatch.setattr(capture, "capture", graphs.capture)
    return graphs
