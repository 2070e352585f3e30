"""Nets whose first layer whitens its input: initialise it from training images, and end the training of its bias early.

Such a net has a method `initialise(images)` and a buffer `whitened`; see `models.whitened`.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.hardware import MAX_FLOATS

WHITENING_IMAGES = 5_000  # as in airbench (K. Jordan, 2024)


def images_to_whiten(data: Any) -> Tensor:
    """Return training images of a datamodule, normalised: float32 (B, C, H, W), at most a GB."""
    return data.plain_images(min(WHITENING_IMAGES, max(1, MAX_FLOATS // math.prod(data.input_shape))))


def _first_images(trainer: pl.Trainer) -> Tensor:
    """Return images of the first training batches, float32 (B, C, H, W)."""
    loader: Any = trainer.train_dataloader
    batches = [batch[0] for batch in islice(loader, 8)]
    return torch.cat(batches)[:WHITENING_IMAGES]


class Whitening(Callback):
    """Compute the whitening layer before the first step, on the first device for all.

    With `model.whiten_epochs`, the rate of its bias falls to 0 early. From then on the bias is left out of the backward pass,
    except under gradient clipping, which would count its gradient, and on several devices, which would wait for it.
    """

    def __init__(self) -> None:
        self._schedule: Any = None  # until it has ended

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Find the schedule of the bias."""
        self._reset(pl_module)
        if pl_module.hparams["whiten_epochs"] and not trainer.gradient_clip_val and trainer.world_size == 1:
            self._schedule = trainer.lr_scheduler_configs[0].scheduler

    @property
    def leaves_bias_out(self) -> bool:
        """Whether the bias will be left out of the backward pass later in this fit."""
        return self._schedule is not None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Initialise the layer here, so that it counts towards the training time, as in airbench."""
        net = pl_module.net
        if bool(net.whitened):
            return
        if trainer.is_global_zero:
            data = trainer.datamodule  # type: ignore[attr-defined]
            images = images_to_whiten(data) if hasattr(data, "plain_images") else _first_images(trainer)
            net.initialise(images.to(net.whiten.weight))
        net.whiten.weight.data.copy_(trainer.strategy.broadcast(net.whiten.weight.detach()))
        net.whitened.fill_(True)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Leave the bias out once its schedule has ended."""
        if self._schedule is not None and self._schedule.whitening_ended:
            pl_module.net.bias_is_final, self._schedule = True, None

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Give the bias its gradient back."""
        self._reset(pl_module)

    def _reset(self, pl_module: Any) -> None:
        pl_module.net.bias_is_final, self._schedule = False, None
