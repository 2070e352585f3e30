"""`--auto-batch` and `--auto-lr`: find the largest batch size that fits, and a learning rate, before the training.

Each search is a short fit of a copy of the model, with the batches, the precision and the loss of the training.
Lightning's Tuner (2.6) removes all callbacks, and with them the loss hooks. Its `lr_find` gives all parameter groups
the same rate; ours differ up to a thousandfold. Its `scale_batch_size` runs out of memory; a CPU swaps before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from cifar_lit.data.batch import Batch
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import Failure, UsageError
from cifar_lit.memory import free_memory
from cifar_lit.text import say
from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.classifier import ImageClassifier

SIZES = [2**power for power in range(4, 13)]  # above 4,096, images/s no longer rises and accuracy falls
RATES = ("bias_lr", "head_lr")  # options of optimizers that are scaled like the learning rate
# The settings that each search finds.
SEARCHED = {
    "batch": ("data.batch_size",),
    "lr": ("model.lr", *(f"model.optimizer_options.{rate}" for rate in RATES), "finetune.input_lr"),
}
PEAK = 2.0  # times the bytes saved for the backward pass: a high estimate of the peak
USABLE = 0.9  # fraction of the free memory
MIN_EPOCH_STEPS = 20  # steps per epoch that the batch size must allow
MIN_STEPS, MAX_STEPS = 60, 300  # steps of the range test
DECADES = (-3, 2)  # logarithms of the factors of the test, relative to the configured rate
PROBE_IMAGES = 512  # images whose loss is computed after every step; a small batch would be noisy
WINDOW = 0.25  # decades of the rate to either side over which the fall of the loss is measured
MIN_FALL = 0.02  # fraction of the first loss; a smaller fall is noise
BLOWN_UP = 4.0  # times the lowest loss; a higher loss ends the test

MakeTrainer = Callable[..., Trainer]  # called with a further callback, and settings that replace the training's


def fit_copy(
    model: ImageClassifier, data: ImageData, make_trainer: MakeTrainer, test: Callback, **limits: object
) -> None:
    """Fit a copy of the model at constant rates. A loss that is not finite ends the fit."""
    model = deepcopy(model)
    model.replace_part("schedule", "constant")
    trainer = make_trainer(test, **limits)
    with isolate_rng(), suppress(NotFiniteLoss):
        trainer.fit(model, datamodule=data)
        if trainer.global_step == 0:
            raise UsageError("--auto-batch and --auto-lr need training steps: set finetune.unfreeze true")


class MemoryTest(Callback):
    """Measure the usable memory before a step, and the bytes that the step needs for each image."""

    at_full_size = True  # without the smaller images of early epochs
    free, bytes_per_image = 0.0, 0.0
    _saved: dict[int, Any] | None = None  # storages by address, kept so that no address is used again

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves within a step."""
        if self._saved is not None:
            self._saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def on_train_batch_start(self, trainer: Trainer, pl_module: ImageClassifier, batch: Batch, batch_idx: int) -> None:
        """Begin to record."""
        self.free, self._saved = USABLE * (free_memory(pl_module.device) or 4 << 30), {}

    def on_after_backward(self, trainer: Trainer, pl_module: ImageClassifier) -> None:
        """Sum the bytes, without those of weights."""
        weights = {weight.untyped_storage().data_ptr() for weight in pl_module.parameters()}
        saved = (storage.nbytes() for place, storage in (self._saved or {}).items() if place not in weights)
        self.bytes_per_image, self._saved = PEAK * sum(saved) / SIZES[0], None


def largest_batch(model: ImageClassifier, data: ImageData, make_trainer: MakeTrainer) -> int:
    """Return the largest of SIZES that fits into memory and has MIN_EPOCH_STEPS; raise Failure if none fits."""
    test, data = MemoryTest(), copy(data)
    data.batch_size = SIZES[0]
    with torch.autograd.graph.saved_tensors_hooks(test.pack, lambda tensor: tensor):
        fit_copy(model, data, make_trainer, test, max_epochs=2, limit_train_batches=1)
    limit = max(SIZES[0], len(data.split[0]) // MIN_EPOCH_STEPS)
    fitting = [size for size in SIZES if size <= limit and size * test.bytes_per_image <= test.free]
    if not fitting:
        raise Failure(f"{SIZES[0]} images do not fit into memory: choose a smaller --net, or --data.placement host")
    return fitting[-1]


class RangeTest(Callback):
    """Multiply the rates of all groups by the next factor at every step, and record the training loss after it."""

    def __init__(self, factors: list[float]) -> None:
        self.factors, self.losses = factors, list[float]()

    def on_train_start(self, trainer: Trainer, pl_module: ImageClassifier) -> None:
        """Choose the batches whose loss is recorded, augmented as in the first epoch."""
        self._rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        loader = trainer.datamodule.train_loader  # type: ignore[attr-defined]
        size = min(loader.batch_size, PROBE_IMAGES)
        batches = islice(replace(loader, batch_size=size, workers=0), -(-PROBE_IMAGES // size))
        self._probe = [trainer.strategy.batch_to_device(batch) for batch in batches]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: ImageClassifier, optimizer: Any) -> None:
        """Set the rates. Steps with such a hook are not captured."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.factors[len(self.losses)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: ImageClassifier, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """Record the loss, unless gradients are accumulated. End the fit if the loss is NaN or has blown up."""
        if trainer.global_step == len(self.losses):
            return
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            loss = float(torch.stack([pl_module.training_step(batch, 0) for batch in self._probe]).mean())
        self.losses.append(loss)
        has_diverged = math.isnan(loss) or loss > BLOWN_UP * min(self.losses)
        trainer.should_stop = has_diverged or len(self.losses) == len(self.factors)


def learning_rate(model: ImageClassifier, data: ImageData, make_trainer: MakeTrainer) -> float:
    """Return the rate at which the loss falls fastest in a range test (L. N. Smith, 2017); raise Failure for none."""
    lr = model.hparams["lr"]
    steps = min(max(MIN_STEPS, len(data.split[0]) // data.batch_size), MAX_STEPS)
    test = RangeTest(torch.logspace(*DECADES, steps).tolist())
    fit_copy(model, copy(data), make_trainer, test, max_epochs=steps)
    reach = max(1, round(WINDOW * steps / (DECADES[1] - DECADES[0])))
    losses = [loss for loss in test.losses if math.isfinite(loss)] or [0.0]
    lowest = losses.index(min(losses))
    falls = {step: losses[step - reach] - losses[step + reach] for step in range(reach, lowest - reach + 1)}
    if not falls or min(losses) > (1 - MIN_FALL) * losses[0]:
        tested = f"{lr * 10 ** DECADES[0]:.2g} … {lr * 10 ** DECADES[1]:.2g}"
        raise Failure(f"no learning rate in {tested} lowers the loss clearly in {steps} steps: set --lr")
    return float(f"{lr * test.factors[max(falls, key=falls.__getitem__)]:.2g}")


def scaled(rate: float | None, factor: float) -> float | None:
    """Return a rate times a factor, with two digits; None for None."""
    if rate is None:
        return None
    return float(f"{rate * factor:.2g}")


def search(auto: set[str], model: ImageClassifier, data: ImageData, make_trainer: MakeTrainer) -> float:
    """Set the batch size of `data` ("batch" in auto) and the learning rates of `model` ("lr"), and print them.

    Returns the factor by which the rates were multiplied.
    """
    factor = 1.0
    if "batch" in auto:
        size = largest_batch(model, data, make_trainer)
        say(f"--auto-batch: {size} images (configured: {data.batch_size})")
        data.batch_size = size
    if "lr" in auto:
        lr, rate = model.hparams["lr"], learning_rate(model, data, make_trainer)
        say(f"--auto-lr: {rate:g} (configured: {lr:g}), where the loss falls fastest; all rates are scaled alike")
        factor = rate / lr
        options = dict(model.hparams["optimizer_options"] or {})
        for name in RATES:
            if name in options:
                options[name] = scaled(options[name], factor)
        model.hparams["lr"] = rate
        model.hparams["optimizer_options"] = options or None
    return factor
