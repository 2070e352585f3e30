"""Exponential moving average of the weights (`model.ema_decay`)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from cifar_lit.models.state import with_versions


class WeightAverage(EMAWeightAveraging):
    """Lightning's average, with norms' running statistics averaged too, and gone after the fit.

    Lightning's own would put it, or the *current* weights of a checkpoint, in the place of what is tested by the same Trainer.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay, use_buffers=True)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Makes the average where the module will be; at this time it has not been moved yet."""
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the average the precision of float64 weights, which would be rounded when the two change places."""
        if self._average_model is not None and pl_module.dtype == torch.float64:
            self._average_model.module.double()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves average and current weights."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["state_dict"] = with_versions(pl_module, checkpoint["state_dict"])

    def start_from(self, pl_module: pl.LightningModule) -> None:
        """Makes weights that were set since set-up, before the first step, the average of so far."""
        assert self._average_model is not None
        self._average_model.module.load_state_dict(pl_module.state_dict())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the average in the model."""
        super().on_train_end(trainer, pl_module)
        self._average_model = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores average and current weights when a fit is resumed."""
        if trainer.state.fn == "fit" and "averaging_state" in checkpoint:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
