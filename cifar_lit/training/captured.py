"""Training steps as CUDA graphs (`model.capture`): the kernels of a step are captured once, then replayed.

With `model.capture false`, Lightning's own `optimizer_step` runs, with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from cifar_lit.training.whitening import Whitening

WARM_UP_STEPS = 3  # before a capture, for libraries to select kernels and optimizers to create states
# Hooks that a replayed step cannot call.
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def device_graphs(device: torch.device) -> Any:
    """Return the module of a device that supports graphs (such as `torch.cuda`), else None."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "CUDAGraph") else None


def can_capture(trainer: Any, enabled: bool) -> bool:
    """Return whether steps can be replayed: `enabled`, one device that supports graphs, no code within a step."""
    if not enabled or device_graphs(trainer.strategy.root_device) is None:
        return False
    accumulates = trainer.accumulate_grad_batches > 1 or any(
        isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks
    )
    scales = getattr(trainer.precision_plugin, "scaler", None) is not None
    # Look at the instance, where LambdaCallback sets its hooks.
    has_hooks = any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)
        for callback in trainer.callbacks
        for name in HOOKS
    )
    return not (trainer.world_size > 1 or accumulates or scales or has_hooks)


class CapturedSteps(Callback):
    """Replace the `optimizer_step` of the model for one fit, if `can_capture` allows it."""

    def __init__(self) -> None:
        self._steps: GraphedSteps | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Capture a step for each shape of batch, before the training time starts.

        A resumed fit captures later, because its checkpoint replaces the optimizer states.
        """
        self._release(pl_module)
        if not can_capture(trainer, pl_module.hparams["capture"]):
            return
        pl_module.watch_losses()
        self._steps = GraphedSteps(pl_module)
        pl_module.optimizer_step = self._optimizer_step
        if not trainer.ckpt_path:
            self._steps.rehearse(example_batches(trainer, pl_module))

    def _optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert self._steps is not None
        self._steps.step(optimizer_closure)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch, which `optimizer_step` does not receive."""
        if self._steps is not None:
            self._steps.batch = batch

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Release the graphs before the net leaves the device."""
        self._release(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Release the graphs after a failed fit, because a traceback may keep the model alive."""
        self._release(pl_module)

    def _release(self, pl_module: Any) -> None:
        self._steps = None
        vars(pl_module).pop("optimizer_step", None)


def example_batches(trainer: pl.Trainer, model: Any) -> Iterator[Any]:
    """Yield a batch of each shape in the fit, the largest first, after setting `net.bias_is_final` for it."""
    net, data = model.net, trainer.datamodule  # type: ignore[attr-defined]
    if not hasattr(data, "train_loader"):
        return
    skips_bias = any(isinstance(callback, Whitening) and callback.skips_bias for callback in trainer.callbacks)  # type: ignore[attr-defined]
    end = model.hparams["whiten_epochs"] if skips_bias else math.inf
    epochs = range(data.epochs or 1)
    kinds = {(data.side(epoch), is_final) for epoch in epochs for is_final in (epoch >= end, epoch + 1 > end)}
    for side, is_final in sorted(kinds, key=lambda kind: (kind[0] or math.inf, kind[1]), reverse=True):
        net.bias_is_final = is_final
        yield from batches_of_side(data, side)
    net.bias_is_final = False


def batches_of_side(data: Any, side: int | None) -> Iterator[Any]:
    """Yield a training batch of each size in an epoch, the largest first. side: see `ImageData.side`."""
    loader = data.train_loader
    rows, make = loader.epoch_plan(0)
    sizes = {len(part) for part in rows.split(loader.batch_size)[: len(loader)]}
    for size in sorted(sizes, reverse=True):
        (batch,) = make([(rows[:size], 1.0)])
        yield data.preprocessing.train_batch(move_data_to_device(batch, data.device), side)


class GraphedSteps:
    """The optimizer steps of one fit, with one graph per shape of batch, before and after the whitening bias is final.

    Replays read and write weights, optimizer states, learning rates and running metrics at fixed addresses. All
    warm-ups and captures use one stream, because gradients belong to a stream, and memory freed on another stream is
    not reused. All graphs share one memory pool, because they never run concurrently.

    Attributes:
        batch: the next batch to train on.
    """

    def __init__(self, model: Any) -> None:
        self.batch: Any = None
        self._model = model
        self._module = device_graphs(model.device)
        self._stream, self._pool = self._module.Stream(), self._module.graph_pool_handle()
        self._warm_ups: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Any, Any, Tensor]] = {}  # graph, its input batch, its output loss

    def step(self, closure: Any) -> None:
        """Run a step on `batch`, and store its loss in Lightning's closure, which is not called."""
        closure._result = ClosureResult(self._step(self.batch))

    def rehearse(self, batches: Iterable[Any]) -> None:
        """Warm up and capture a step on each batch, then restore all state. Do not call this in a resumed fit."""
        model = self._model
        hook_tensors = [tensor for hook in model.loss_hooks for tensor in getattr(hook, "tensors", ())]
        tensors = [*model.net.parameters(), *model.net.buffers(), *model.running.tensors, *hook_tensors]
        with torch.no_grad():
            copies = [tensor.clone() for tensor in tensors]
        devices = [] if model.device.type == "cpu" else [model.device]
        with torch.random.fork_rng(devices, device_type=model.device.type):
            for batch in batches:
                for _ in range(WARM_UP_STEPS + 1):
                    self._step(batch)
        with torch.no_grad():
            torch._foreach_copy_(tensors, copies)
            for state in model.trainer.optimizers[0].state.values():
                for value in state.values():
                    value.zero_()  # all optimizer states start at 0

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
        else:
            static = batch.clone()
            graph = self._module.CUDAGraph()
            # With thread_local, another thread that pins memory does not invalidate the capture.
            with self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                loss = self._run(static)
            self._captured[key] = graph, static, loss
            graph.replay()
        return loss

    def _run(self, batch: Any) -> Tensor:
        """Run a step without synchronising. After a non-finite loss, `found_inf` keeps steps from changing anything."""
        model, trainer = self._model, self._model.trainer
        optimizer = trainer.optimizers[0]
        with trainer.precision_plugin.train_step_context():
            loss = model.training_step(batch, 0)
        loss.backward()
        model.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()
