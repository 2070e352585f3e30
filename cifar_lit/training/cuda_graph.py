"""Training steps as CUDA graphs: what a step launches is recorded once and replayed, so that the host has nothing to do for it.

A layer that can be taken away: with `model.capture false` Lightning's own `optimizer_step` runs, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

WARM_UP_STEPS = 3  # before a capture, in which libraries choose their kernels and optimizers make their states
# Callbacks that want to be called here are, which a replayed step cannot do.
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def device_graphs(device: torch.device) -> Any:
    """The device's module where it can capture graphs, else None."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "CUDAGraph") else None


def can_capture(trainer: Any, wanted: bool) -> bool:
    """Whether the steps of a fit can be replayed: the device has graphs, it works alone, and nothing looks in between."""
    if not wanted or device_graphs(trainer.strategy.root_device) is None:
        return False
    accumulates = trainer.accumulate_grad_batches > 1 or any(
        isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks
    )
    scales = getattr(trainer.precision_plugin, "scaler", None) is not None
    # asked of objects, as LambdaCallback's hooks are not its class's
    observed = any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)
        for callback in trainer.callbacks
        for name in HOOKS
    )
    return not (trainer.world_size > 1 or accumulates or scales or observed)


class EndOfGraphs(Callback):
    """Lets go of the graphs of a fit that fails, before the next one's are made: a traceback may keep the failed model."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends them as the end of a fit does."""
        pl_module.on_fit_end()


class GraphedSteps:
    """The optimizer steps of one fit, captured for each shape of batch, and anew when the whitening's bias is final.

    Weights, optimizer states, rates and running metrics stay where they are in memory, so that a replay reads and writes them as
    a step would. One stream for warm-ups and captures, since gradients remember theirs, and memory that another stream freed
    could not be used again; one memory pool, as graphs never run at the same time. Both end with the fit.
    """

    def __init__(self, model: ImageClassifier) -> None:
        self.batch: Any = None  # the one to train on next
        self._model = model
        self._module = device_graphs(model.device)
        self._stream, self._pool = self._module.Stream(), self._module.graph_pool_handle()
        self._warm_ups: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Any, Any, Tensor]] = {}  # the graph, the batch it reads, the loss it writes

    def step(self, closure: Any) -> None:
        """One step on `batch`. closure: Lightning's, which is not run; it is handed the loss that it is asked for later."""
        closure._result = ClosureResult(self._step(self.batch))

    def rehearse(self, batches: Iterable[Any]) -> None:
        """Warms up and captures a step on each of these batches, and puts all that they change back: the clock has not started.

        Only in a fit from its beginning: the states of an optimizer that is resumed take others' places later on.
        """
        model = self._model
        losses = [] if model.last_losses is None else [model.last_losses]
        tensors = [*model.net.parameters(), *model.net.buffers(), *model.running.tensors, *losses]
        with torch.no_grad():
            before = [tensor.clone() for tensor in tensors]
        devices = [] if model.device.type == "cpu" else [model.device]
        with torch.random.fork_rng(devices, device_type=model.device.type):
            for batch in batches:
                for _ in range(WARM_UP_STEPS + 1):
                    self._step(batch)
        with torch.no_grad():
            torch._foreach_copy_(tensors, before)
            for state in model.trainer.optimizers[0].state.values():
                for value in state.values():
                    value.zero_()  # as they are before the first step

    def _step(self, batch: Any) -> Tensor:
        key = (tuple(batch.images.shape), batch.loss_weight, getattr(self._model.net, "bias_is_final", False))
        if key in self._captured:
            graph, static, loss = self._captured[key]
            static.images.copy_(batch.images)
            static.labels.copy_(batch.labels)
            static.indices.copy_(batch.indices)
            if static.targets is not None:
                static.targets.copy_(batch.targets)
            graph.replay()
        elif self._warm_ups.setdefault(key, 0) < WARM_UP_STEPS:
            self._warm_ups[key] += 1
            self._stream.wait_stream(self._module.current_stream())
            with self._module.stream(self._stream):
                loss = self._run(batch)
            self._module.current_stream().wait_stream(self._stream)
        else:  # `clone` keeps channels_last, which the net was warmed up with
            targets = None if batch.targets is None else batch.targets.clone()
            images, labels, indices = batch.images.clone(), batch.labels.clone(), batch.indices.clone()
            static = batch._replace(images=images, labels=labels, indices=indices, targets=targets)
            graph = self._module.CUDAGraph()
            # thread_local: a thread that pins memory meanwhile does not spoil the capture
            with self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                loss = self._run(static)
            self._captured[key] = graph, static, loss
            graph.replay()
        return loss

    def _run(self, batch: Any) -> Tensor:
        """A step without a look at any value; a loss that is not finite changes nothing from then on (`found_inf`)."""
        model, trainer = self._model, self._model.trainer
        optimizer = trainer.optimizers[0]
        with trainer.precision_plugin.train_step_context():
            loss = model.training_step(batch, 0)
        loss.backward()
        model.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()
