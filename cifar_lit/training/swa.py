"""Stochastic weight averaging (`model.swa_from`; P. Izmailov et al., UAI 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from torch.optim.swa_utils import update_bn

from cifar_lit.errors import UsageError
from cifar_lit.hardware import MAX_FLOATS
from cifar_lit.training.callbacks import last_epoch
from cifar_lit.training.weight_average import AverageOfFit

NORM_IMAGES = 10_000  # at most, to compute the statistics of batch norms


class EpochAverage(AverageOfFit):
    """Mean of the weights at the ends of the epochs from a share of the training on, with its own norm statistics.

    Lightning's StochasticWeightAveraging replaces the schedule, adds an epoch, validates the current weights, and loses
    its learning rate if the fit is resumed within the epoch in which it starts.
    """

    def __init__(self, start: float, updates_norms: bool) -> None:
        super().__init__(use_buffers=False)
        self._start, self._updates_norms = start, updates_norms

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise UsageError if the length of the training is unknown."""
        if not last_epoch(trainer):
            raise UsageError("model.swa_from is a share of the epochs: set --epochs, or model.swa_from 0")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Include the weights after the last step of an epoch, before they are validated."""
        step = trainer.global_step
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or step == trainer.max_steps
        if not is_last or step <= self._latest_update_step or self._average_model is None:
            return
        if (trainer.current_epoch + 1) / (last_epoch(trainer) or math.inf) < self._start:
            return
        self._average_model.update_parameters(pl_module)
        self._latest_update_step = step
        if self._updates_norms:
            with trainer.precision_plugin.train_step_context():
                update_bn(norm_batches(trainer), self._average_model.module, pl_module.device)

    @property
    def _has_started(self) -> bool:
        return self._average_model is not None and bool(self._average_model.n_averaged)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        if self._has_started:
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        if self._has_started:
            super()._copy_average_to_current(pl_module)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save average and current weights; before the average starts, only the current ones."""
        if self._has_started:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)


def norm_batches(trainer: pl.Trainer) -> Iterable[Any]:
    """Return batches of training images: of ImageData evenly spaced, not augmented, and equal on all devices."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not hasattr(data, "plain_images"):
        return trainer.train_dataloader or ()
    images = data.plain_images(min(NORM_IMAGES, MAX_FLOATS // math.prod(data.input_shape)))
    return images.tensor_split(math.ceil(len(images) / data.batch_size))  # no batch of one image
