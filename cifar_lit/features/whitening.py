"""Training of a whitening layer (`models.whitened`): compute it from images, and stop training its bias early."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from cifar_lit.base.errors import UsageError
from cifar_lit.base.memory import FLOATS_AT_ONCE
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training.loop import broadcast_from_first, steps_per_epoch
from cifar_lit.training.schedules import SCHEDULES, Schedule

if TYPE_CHECKING:
    from cifar_lit.data.image_set import Batch
    from cifar_lit.training.classifier import ImageClassifier

WHITENING_IMAGES = 5_000  # airbench's value (K. Jordan, 2024)


@final
class Whitening(Callback):
    """Compute the first layer of the net `whitened` from training images, on the first device before the first step.

    With `bias_epochs`, the learning rate of the layer's bias falls to 0 early. The backward pass then skips the bias,
    unless gradient clipping or DDP need its gradient. Other nets stay as they are.

    Args:
        bias_epochs: epochs over which the learning rate of the layer's bias falls linearly to 0, unless rates are
            constant. Default: the schedule of the other parameters.
    """

    def __init__(self, bias_epochs: float | None = None) -> None:
        self.bias_epochs = bias_epochs
        self._schedule: Schedule | None = None  # schedule of the bias, until it ends
        self._end = math.inf  # steps, or epochs, of the schedule

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Raise UsageError, before the run has a folder, if there is no schedule of the bias to shorten."""
        net, h = pl_module.net, pl_module.hparams
        if stage != "fit" or self.bias_epochs is None or not isinstance(net, WhitenedNet):
            return
        has_bias = net.whiten.bias.requires_grad  # type: ignore[union-attr]
        if not has_bias or h["optimizer"] != "muon" or h["schedule"] not in SCHEDULES:
            needs = "a net with a whitening bias to train, model.optimizer muon and one of our schedules"
            raise UsageError(f"whitening.bias_epochs needs {needs}: leave it out")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Shorten the schedule of the bias."""
        if not isinstance(pl_module.net, WhitenedNet):
            return
        pl_module.net.is_prepared = True
        self._reset(pl_module.net)
        configs = trainer.lr_scheduler_configs
        if self.bias_epochs is None or not configs:  # without a scheduler, rates are constant
            return
        schedule: Any = configs[0].scheduler
        self._end = self.bias_epochs
        if configs[0].interval == "step":
            self._end *= steps_per_epoch(trainer)
        schedule.end_early("whitening", self._end)
        if not trainer.gradient_clip_val and trainer.world_size == 1:
            self._schedule = schedule

    def on_train_start(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Initialise the layer here, so that the training time includes it, as in airbench."""
        net = pl_module.net
        if not isinstance(net, WhitenedNet) or bool(net.whitened):
            return
        if trainer.is_global_zero:
            data = trainer.datamodule  # type: ignore[attr-defined]
            if hasattr(data, "plain_images"):
                limit = max(1, FLOATS_AT_ONCE // math.prod(data.input_shape))  # images in 1 GB
                images = data.plain_images(min(WHITENING_IMAGES, limit))
            else:
                batches = islice(trainer.train_dataloader, 8)  # type: ignore[arg-type]
                images = torch.cat([images for images, _ in batches])[:WHITENING_IMAGES]
            net.initialise(images.to(net.whiten.weight))
        broadcast_from_first(trainer, net.whiten.weight)
        net.whitened.fill_(True)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, batch: Batch, batch_idx: int
    ) -> None:
        """Skip the bias after its schedule has ended."""
        if self._schedule is not None and self._schedule.last_epoch >= self._end:
            pl_module.net.bias_is_final = True  # type: ignore[assignment]
            self._schedule = None

    def on_fit_end(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Compute the gradient of the bias again."""
        if isinstance(pl_module.net, WhitenedNet):
            self._reset(pl_module.net)

    def _reset(self, net: WhitenedNet) -> None:
        net.bias_is_final = False
        self._schedule = None
