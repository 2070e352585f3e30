"""Training of a whitening layer (`models.whitened`): initialise it from images, and stop training its bias early."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.hardware import MAX_FLOATS
from cifar_lit.training.collectives import broadcast_from_first

WHITENING_IMAGES = 5_000  # airbench's value (K. Jordan, 2024)


def images_to_whiten(data: Any) -> Tensor:
    """Return normalised training images of a datamodule: float32 (B, C, H, W), at most 1 GB."""
    return data.plain_images(min(WHITENING_IMAGES, max(1, MAX_FLOATS // math.prod(data.input_shape))))


class Whitening(Callback):
    """Compute the whitening layer on the first device before the first step.

    With `model.whiten_epochs`, the learning rate of the layer's bias falls to 0 early. The backward pass then skips the
    bias, unless gradient clipping or DDP need its gradient.
    """

    def __init__(self) -> None:
        self._schedule: Any = None  # schedule of the bias, until it ends

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Get the schedule of the bias."""
        self._reset(pl_module)
        if pl_module.hparams["whiten_epochs"] and not trainer.gradient_clip_val and trainer.world_size == 1:
            self._schedule = trainer.lr_scheduler_configs[0].scheduler

    @property
    def skips_bias(self) -> bool:
        """Whether the backward pass will skip the bias later in this fit."""
        return self._schedule is not None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Initialise the layer here, so that the training time includes it, as in airbench."""
        net = pl_module.net
        if bool(net.whitened):
            return
        if trainer.is_global_zero:
            data = trainer.datamodule  # type: ignore[attr-defined]
            if hasattr(data, "plain_images"):
                images = images_to_whiten(data)
            else:
                batches: Any = islice(trainer.train_dataloader, 8)  # type: ignore[arg-type]
                images = torch.cat([images for images, _ in batches])[:WHITENING_IMAGES]
            net.initialise(images.to(net.whiten.weight))
        broadcast_from_first(trainer, net.whiten.weight)
        net.whitened.fill_(True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Skip the bias after its schedule has ended."""
        if self._schedule is not None and self._schedule.whitening_ended:
            pl_module.net.bias_is_final, self._schedule = True, None

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Compute the gradient of the bias again."""
        self._reset(pl_module)

    def _reset(self, pl_module: Any) -> None:
        pl_module.net.bias_is_final, self._schedule = False, None
