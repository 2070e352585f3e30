"""Training steps as CUDA graphs: the kernels of a step are captured once, then replayed.

Without this feature, Lightning's own `optimizer_step` runs, with the same results. The net of captured steps can be
compiled; elsewhere, compiling takes longer than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from cifar_lit.data.batch import Batch
from cifar_lit.errors import first_line
from cifar_lit.features.capture.deferred import DeferredBatch, DeferredBatches
from cifar_lit.hooks import callbacks_with
from cifar_lit.text import note

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier

WARM_UP_STEPS = 3  # before a capture, for libraries to select kernels and optimizers to create states
# Hooks that a replayed step cannot call.
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# Recompile limit; torch's default is 8. A net with whitening compiles each batch shape twice: before and after its
# bias is final.
COMPILED_GRAPHS = 64


def device_graphs(device: torch.device) -> Any:
    """Return the module of a device that supports graphs (such as `torch.cuda`), else None."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "CUDAGraph"):
        return None
    return torch.get_device_module(device)


@final
class Capture(Callback):
    """Replay training steps as CUDA graphs, unless other code must run within a step; on a CPU this has no effect.

    Args:
        compile: compile the net of captured steps with torch.compile.
    """

    may_change = True  # on resume

    def __init__(self, compile: bool = True) -> None:
        self.compile = compile
        self._steps: GraphedSteps | None = None
        self._deferred: DeferredBatches | None = None

    def captures(self, trainer: pl.Trainer) -> bool:
        """Return whether steps can be replayed: on one device that supports graphs, without code within a step."""
        if device_graphs(trainer.strategy.root_device) is None:
            return False
        if trainer.world_size > 1 or trainer.accumulate_grad_batches > 1:
            return False
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                return False
            for name in HOOKS:
                # Look at the instance, where LambdaCallback sets its hooks.
                if getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name):
                    return False
        return True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Capture a step for each shape of batch, before the training time starts.

        A resumed fit captures later, because its checkpoint replaces the optimizer states.
        """
        self._release(pl_module)
        if not self.captures(trainer):
            return
        pl_module.watch_losses()
        self._steps = GraphedSteps(pl_module, self.compile)
        pl_module.optimizer_step = self._steps.optimizer_step  # type: ignore[method-assign]
        trainer.fit_loop.setup_data()  # creates the loader
        if DeferredBatches.supports(trainer.datamodule):  # type: ignore[attr-defined]
            self._deferred = DeferredBatches(trainer.datamodule)  # type: ignore[attr-defined]
        if not trainer.ckpt_path:
            self._steps.rehearse(example_batches(trainer, pl_module, self._deferred))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, batch: Batch, batch_idx: int
    ) -> None:
        """Keep the batch, which `optimizer_step` does not receive."""
        if self._steps is not None:
            if not hasattr(batch, "loss_weight"):  # a pair of another loader
                images, labels = batch
                batch = Batch(images, labels, indices=labels.new_empty(0))
            self._steps.batch = batch

    def on_fit_end(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Release the graphs before the net leaves the device."""
        self._release(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: ImageClassifier, exception: BaseException) -> None:
        """Release the graphs after a failed fit, because a traceback may keep the model alive."""
        self._release(pl_module)

    def _release(self, pl_module: ImageClassifier) -> None:
        self._steps = None
        vars(pl_module).pop("optimizer_step", None)
        if self._deferred is not None:
            self._deferred.release()
            self._deferred = None


TrainingBatch = Batch | DeferredBatch


def example_batches(
    trainer: pl.Trainer, model: ImageClassifier, deferred: DeferredBatches | None
) -> Iterator[TrainingBatch]:
    """Yield a batch of each shape in the fit, the largest first, after setting `net.bias_is_final` for it."""
    net: Any = model.net
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not hasattr(data, "train_loader"):
        return
    end = min((callback.skips_bias_from for callback in callbacks_with(trainer, "skips_bias_from")), default=math.inf)
    kinds = set()
    for epoch in range(data.epochs or 1):
        kinds.add((data.side(epoch), epoch >= end))  # the first batches of the epoch
        kinds.add((data.side(epoch), epoch + 1 > end))  # its last batches: the end may fall within it
    for side, is_final in sorted(kinds, key=lambda kind: (kind[0] or math.inf, kind[1]), reverse=True):
        net.bias_is_final = is_final
        yield from batches_of_side(data, side, deferred)
    net.bias_is_final = False


def batches_of_side(data: ImageData, side: int | None, deferred: DeferredBatches | None) -> Iterator[TrainingBatch]:
    """Yield a training batch of each size in an epoch, the largest first. side: see `ImageData.side`."""
    loader = data.train_loader
    rows, make = loader.epoch_rows(0), loader.maker(0)
    sizes = {len(part) for part in rows.split(loader.batch_size)[: len(loader)]}
    for size in sorted(sizes, reverse=True):
        if deferred:
            yield deferred.batch(rows[:size], 1.0, make, side)
            continue
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

    batch: TrainingBatch

    def __init__(self, model: ImageClassifier, compile_net: bool) -> None:
        self._model = model
        self._module = device_graphs(model.device)
        self._stream, self._pool = self._module.Stream(), self._module.graph_pool_handle()
        scaler = getattr(model.trainer.precision_plugin, "scaler", None)  # only in 16-mixed
        self._scaler = scaler or torch.amp.GradScaler(model.device.type, enabled=False)
        self._warm_ups: dict[Any, int] = {}
        self._captured: dict[Any, tuple[Any, list[Tensor], Tensor]] = {}  # graph, its inputs, its output loss
        # Keys of the current epoch's draws, and their copy that the graphs of deferred batches read.
        self._epoch_keys: Tensor | None = None
        self._keys: Tensor | None = None
        self._compiled: Any = None  # the compiled call of the net, which Module.compile would use everywhere
        if compile_net:
            model.net.compile(dynamic=False)  # one graph per size is faster than one graph for all sizes
            self._compiled, model.net._compiled_call_impl = model.net._compiled_call_impl, None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: object, optimizer_closure: Any = None) -> None:
        """Run a step on `batch`, and store its loss in Lightning's closure, which is not called."""
        # Lightning reads the result of a step from here. Calling the closure would run the step itself.
        optimizer_closure._result = ClosureResult(self._step(self.batch))

    def rehearse(self, batches: Iterable[TrainingBatch]) -> None:
        """Warm up and capture a step on each batch, then restore all state. Do not call this in a resumed fit."""
        model = self._model
        tensors = [*model.net.parameters(), *model.net.buffers(), *model.running.tensors]
        for callback in callbacks_with(model.trainer, "tensors"):
            tensors += callback.tensors
        with torch.no_grad():
            copies = [tensor.clone() for tensor in tensors]
        loss_scale = self._scaler.state_dict()
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
        self._scaler.load_state_dict(loss_scale)

    def _step(self, batch: TrainingBatch) -> Tensor:
        if isinstance(batch, DeferredBatch) and batch.may_be_changed:
            batch = batch.made
        if isinstance(batch, DeferredBatch):
            self._copy_keys(batch.maker.keys)
        key = (*_shape(batch), batch.loss_weight, getattr(self._model.net, "bias_is_final", False))
        if key in self._captured:
            graph, inputs, loss = self._captured[key]
            torch._foreach_copy_(inputs, _inputs(batch))
            graph.replay()
            return loss
        warm_ups = self._warm_ups.get(key, 0)
        if warm_ups < WARM_UP_STEPS:
            self._warm_ups[key] = warm_ups + 1
            return self._warm_up(batch)
        self._captured[key] = graph, _, loss = self._capture(batch)
        graph.replay()  # capturing has run nothing
        return loss

    def _copy_keys(self, keys: Tensor | None) -> None:
        """Copy the keys of a new epoch to where the graphs read them."""
        if keys is None or keys is self._epoch_keys:
            return
        self._epoch_keys = keys
        if self._keys is None:
            self._keys = torch.empty_like(keys)
        self._keys.copy_(keys)

    def _warm_up(self, batch: TrainingBatch) -> Tensor:
        """Run a step on the stream of the graphs."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            loss = self._run(batch)
        self._module.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: TrainingBatch) -> tuple[Any, list[Tensor], Tensor]:
        """Return a graph of a step on a batch of this shape, its inputs, and its loss."""
        if isinstance(batch, DeferredBatch):
            static: TrainingBatch = batch.with_inputs(batch.indices.clone(), self._keys)
        else:
            static = batch.clone()
        graph = self._module.CUDAGraph()
        # With thread_local, another thread that pins memory does not invalidate the capture.
        with self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = self._run(static)
        return graph, _inputs(static), loss

    def _run(self, batch: TrainingBatch) -> Tensor:
        """Run a step without synchronising. After a non-finite loss, `found_inf` keeps steps from changing anything.

        In 16-mixed, the scaler uses `found_inf` to skip a step whose gradients overflow.
        """
        model, trainer = self._model, self._model.trainer
        optimizer: Any = trainer.optimizers[0]
        if isinstance(batch, DeferredBatch):
            batch = batch.make()  # here, because autocast would round smaller images to bfloat16
        with trainer.precision_plugin.train_step_context():
            loss = self._loss(batch)
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        model.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        optimizer._step_supports_amp_scaling = True  # The scaler sets `found_inf` instead of reading it on the host.
        self._scaler.step(optimizer)
        optimizer._step_supports_amp_scaling = False
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss of the compiled net; of the net itself if the compiler fails, as without a C compiler."""
        model = self._model
        if self._compiled is None:
            return model.training_step(batch, 0)
        model.net._compiled_call_impl = self._compiled
        try:
            with torch._dynamo.config.patch(recompile_limit=COMPILED_GRAPHS):
                return model.training_step(batch, 0)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._compiled = None
            cause = first_line(getattr(error, "inner_exception", error))
            note(f"the net is not compiled, because the compiler failed ({cause}): add --capture.compile false")
        finally:
            model.net._compiled_call_impl = None  # validation and tests run too few steps to be worth compiling for
        return model.training_step(batch, 0)


def _shape(batch: TrainingBatch) -> tuple[int | None, ...]:
    """Return the shape part of the cache key of a batch's graph."""
    if isinstance(batch, DeferredBatch):
        return batch.side, len(batch.indices)
    return tuple(batch.images.shape)


def _inputs(batch: TrainingBatch) -> list[Tensor]:
    """Return the tensors of a batch that a graph reads."""
    if isinstance(batch, DeferredBatch):
        return [batch.indices]
    tensors = (batch.images, batch.labels, batch.indices, batch.targets)
    return [tensor for tensor in tensors if tensor is not None]
