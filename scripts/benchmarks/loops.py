"""A hand-written training loop and data set to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from itertools import count, islice
from typing import Any

import lightning.pytorch as pl
import torch
from timed_fit import Stopwatch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchvision.transforms import Compose

from cifar_lit.base.errors import UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.loaders import Batch
from cifar_lit.features.compile import Compile
from cifar_lit.features.weight_average import WeightAverage
from cifar_lit.features.whitening import Whitening
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.loop import steps_per_epoch

AUTOCAST = {"32-true": False, "bf16-mixed": True}  # precisions of the bare loop


class ArrayImages(Dataset[tuple[Tensor, int]]):
    """Images as in torchvision's data sets: an array (H, W, C), or (H, W) for one channel, transformed on access."""

    def __init__(self, images: ImageSet, transforms: Sequence[Callable[[Any], Any]]) -> None:
        arrays = images.images.numpy()
        self.arrays: Any = arrays if arrays.shape[3] > 1 else arrays[..., 0]
        self.labels, self.transform = images.labels.tolist(), Compose(transforms)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.arrays[index]), self.labels[index]


def batches_on_device(data: ImageData, device: torch.device) -> Iterator[Iterator[Batch]]:
    """Yield epochs of normalised batches on the device, as the Trainer passes them to the model."""
    data = copy(data)  # creates a loader of its own for the same images
    loader: Any = data.train_dataloader()
    for epoch in count():
        loader.set_epoch(epoch)
        yield (data.on_after_batch_transfer(data.transfer_batch_to_device(batch, device, 0), 0) for batch in loader)


class BareLoop:
    """The shortest loop that computes a model's training steps: the baseline for the overhead of the Trainer.

    Net, batches, precision, optimizer, schedule and weight average are copied from the model on construction. If the
    Trainer compiles the net, so does this loop.

    Attributes:
        net: the copy that is trained.
        average: average of its weights, if the model's settings ask for one.

    Raises:
        UsageError: if the precision is unsupported or the model has class weights.
    """

    def __init__(self, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> None:
        if model.loss.changes:
            raise UsageError("the bare loop changes no losses: choose a --recipe without class_weights and the like")
        if trainer.precision not in AUTOCAST:
            raise UsageError(
                f"the bare loop has no precision {trainer.precision}: set --precision to {' or '.join(AUTOCAST)}"
            )
        twin = ImageClassifier(**model.hparams).to(model.device)  # the optimizer's kernels depend on the device
        self.net = twin.net = deepcopy(model.net)
        twin.train()
        features: dict[Any, Any] = {type(callback): callback for callback in trainer.callbacks}  # type: ignore[attr-defined]
        if Compile in features:
            features[Compile].on_fit_start(trainer, twin)
        twin.trainer = trainer  # gives the schedule the length of the training
        configured: Any = twin.configure_optimizers()
        if not isinstance(configured, dict):  # a constant rate
            configured = {"optimizer": configured, "lr_scheduler": {"scheduler": None, "interval": ""}}
        self.optimizer, self.schedule = configured["optimizer"], configured["lr_scheduler"]
        self._end_of_bias = math.inf
        if Whitening in features and self.schedule["scheduler"] is not None and features[Whitening].bias_epochs:
            self._end_of_bias = features[Whitening].bias_epochs
            if self.schedule["interval"] == "step":
                self._end_of_bias *= steps_per_epoch(trainer)
            self.schedule["scheduler"].end_early("whitening", self._end_of_bias)
        self.average = None
        if WeightAverage in features:
            average = get_ema_multi_avg_fn(features[WeightAverage].decay)
            self.average = AveragedModel(self.net, multi_avg_fn=average, use_buffers=True)
        self._autocast, self._smoothing = AUTOCAST[trainer.precision], model.hparams["label_smoothing"]
        self._running = self._steps(batches_on_device(data, model.device))

    def take(self, count: int) -> int:
        """Train that many steps; return the number of images."""
        return sum(islice(self._running, count))

    def _step(self, images: Tensor, targets: Tensor) -> None:
        # Without autocast's cache, as under the Trainer.
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._autocast, cache_enabled=False):
            loss = F.cross_entropy(self.net(images), targets, label_smoothing=self._smoothing)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _steps(self, epochs: Iterator[Iterator[Batch]]) -> Iterator[int]:
        scheduler, interval = self.schedule["scheduler"], self.schedule["interval"]
        for epoch in epochs:
            for batch in epoch:
                images, labels = batch
                self._step(images, labels if batch.targets is None else batch.targets)
                if interval == "step":
                    scheduler.step()
                if self.average:
                    self.average.update_parameters(self.net)
                yield len(labels)
            if interval == "epoch":
                scheduler.step()
            if interval:  # only nets with whitening read the attribute
                self.net.bias_is_final = scheduler.last_epoch >= self._end_of_bias


class Race(Stopwatch):
    """A stopwatch whose other loop is the bare one."""

    def start_other(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Copy the model into a bare loop. The rounds begin after the whitening schedule, which changes later steps."""
        assert isinstance(model, ImageClassifier)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Whitening):
                self.warmup += math.ceil(callback.bias_epochs or 0) * self.steps_per_epoch
        self.loop = BareLoop(trainer, model, trainer.datamodule)  # type: ignore[attr-defined]

    def take_turn(self, steps: int) -> None:
        """Train that many steps."""
        self.loop.take(steps)
