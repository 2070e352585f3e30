"""Device graphs: what a step launches is recorded once and replayed, so that the host has nothing to do for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3  # steps before a capture, in which libraries choose their kernels and optimizers make their states


def graphs_of(device: torch.device) -> Any:
    """The device's module where it can capture graphs, else None."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "CUDAGraph") else None


def capture(module: Any, function: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Records what `function` launches, without running it; returns what runs it."""
    graph = module.CUDAGraph()
    with module.graph(graph, pool=pool):
        function()
    replay: Callable[[], None] = graph.replay
    return replay


class Captured:
    """A step for batches of one shape: run as it is a few times, then captured, then replayed.

    step: takes images, labels and share; everything else it uses must stay where it is in memory.
    """

    def __init__(self, module: Any, step: Callable[[Tensor, Tensor, float], None]) -> None:
        self._module, self._step = module, step
        self._runs = 0
        self._images = self._labels = torch.empty(0)
        self._replay: Callable[[], None] | None = None

    def run(self, batch: Any) -> None:
        """One step on a batch (images, labels, indices, share); `share` is that of the first one."""
        if self._replay is None and self._runs < WARM_UP:
            self._runs += 1
            self._beside(lambda: self._step(batch.images, batch.labels, batch.share))
            return
        if self._replay is None:
            # `clone` keeps channels_last, which the net was warmed up with
            self._images, self._labels = batch.images.clone(), batch.labels.clone()
            self._replay = capture(self._module, lambda: self._step(self._images, self._labels, batch.share), _pool(self._module))
        else:
            self._images.copy_(batch.images)
            self._labels.copy_(batch.labels)
        self._replay()

    def _beside(self, function: Callable[[], None]) -> None:
        """Runs on a stream of its own, as capturing will, since gradients remember the stream they were made on."""
        module = self._module
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            function()
        module.current_stream().wait_stream(stream)


@cache
def _pool(module: Any) -> Any:
    """One pool of memory for all captures of a process: they never run at the same time."""
    return module.graph_pool_handle()
