"""A fake of CUDA graphs on the CPU: it records the operations of a step and replays them on the same tensors.

It finds the errors of a graph: frozen numbers and addresses, reads by the host, sizes that depend on values.
Its pool and streams follow the rules of torch's allocator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cifar_lit.features import capture

# Operations that wait for the device or whose output size depends on values; `lift_fresh` copies a number of the host.
VALUE_SIZED = {"nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
REFUSED = {*VALUE_SIZED, "_local_scalar_dense", "equal", "lift_fresh"}


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Record each operation with its tensors. `undo` reverts their changes, because a capture computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}  # storages older than the capture, with a copy of each

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile run compiled nets under this mode."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        inputs = tensors_in((args, kwargs))
        index_types = {index.dtype for index in tensors_in(args[1:2])} if name.startswith("index") else set()
        masked = bool(index_types & {torch.bool, torch.uint8})
        assert name not in REFUSED and not masked, f"{name} cannot be captured"
        for tensor in inputs:
            if (storage := storage_of(tensor)) not in self._made:
                self._before.setdefault(storage, (tensor.untyped_storage(), tensor.untyped_storage().clone()))
        result = function(*args, **kwargs)
        self._made |= {storage_of(tensor) for tensor in tensors_in(result)} - self._before.keys()
        self.calls.append((function, args, kwargs, result))
        return result

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


class Stream:
    """A stream that records for which others it has waited since it was last used."""

    def __init__(self) -> None:
        self.waited = set[Stream]()

    def wait_stream(self, other: "Stream") -> None:
        self.waited.add(other)


class Pool:
    """The private memory of graphs. cuBLAS's workspace keeps it after the last one, and torch refuses a new graph."""

    def __init__(self) -> None:
        self.graphs = 0
        self.used = False


class Graph:
    """Replays a recording."""

    def replay(self) -> None:
        # In torch 2.12 to 2.14 a graph that dies frees the workspace of those that outlive it.
        assert self.deaths == self.module.deaths, "a graph has died before this one's replay"
        self.module.replays += 1
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                for recorded, replayed in zip(tensors_in(result), tensors_in(function(*args, **kwargs)), strict=True):
                    if storage_of(recorded) != storage_of(replayed):  # neither written in place nor a view
                        recorded.copy_(replayed)

    def record(self, module: "Module", pool: Pool, calls: list[Any]) -> None:
        self.module, self.pool, self.calls, self.deaths = module, pool, calls, module.deaths
        pool.graphs, pool.used = pool.graphs + 1, True

    def __del__(self) -> None:
        self.pool.graphs -= 1
        self.module.deaths += 1


class Module:
    """The graph functions of a device's module. `streams` and `pools` are those of the captures."""

    Stream, CUDAGraph, graph_pool_handle = Stream, Graph, Pool

    def __init__(self) -> None:
        self._main = Stream()
        self.streams, self.pools = set[Stream](), set[Pool]()
        self.graphs = WeakSet[Graph]()
        self.captures = self.replays = self.deaths = 0
        self._warmed_up_on: Stream | None = None

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert self._main in stream.waited, "a step on another stream would read its batch too early"
        stream.waited.clear()
        self._main.waited.discard(stream)
        self._warmed_up_on = stream
        yield

    def current_stream(self) -> Stream:
        return self._main

    @contextmanager
    def graph(self, graph: Graph, pool: Pool, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "a thread that pins memory spoils the capture"
        assert stream in self._main.waited, "the host's stream would read the results of a warm-up too early"
        assert stream is self._warmed_up_on, "memory that another stream has freed cannot be used again"
        assert pool.graphs or not pool.used, "use_count > 0 INTERNAL ASSERT FAILED"
        with Recorder() as recorder:
            yield
        recorder.undo()
        graph.record(self, pool, recorder.calls)
        self.captures += 1
        self.streams.add(stream)
        self.pools.add(pool)
        self.graphs.add(graph)


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Let the trainings of this test capture their steps on the CPU."""
    module = Module()
    monkeypatch.setattr(capture, "device_graphs", lambda device: module)
    return module
