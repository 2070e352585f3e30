"""The exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging


class WeightAverage(EMAWeightAveraging):
    """Lightning's average, with norms' running statistics averaged too, and silent outside of a fit.

    Lightning's own reloads the *current* weights when a checkpoint is loaded for a test in the process that trained,
    so that the average would be validated and the last weights tested.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay, use_buffers=True)

    def begin_at(self, pl_module: pl.LightningModule) -> None:
        """Averages from the weights as they are now: they were initialised after the copy was made."""
        if self._average_model is not None:
            self._average_model.module.load_state_dict(pl_module.state_dict())

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the average in the place of the weights, in a fit; afterwards the model holds what is to be scored."""
        if trainer.state.fn == "fit":
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the weights back."""
        if trainer.state.fn == "fit":
            super().on_validation_epoch_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the average in the place of the weights while training."""
        if self._average_model is not None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores average and current weights when a fit is resumed."""
        if trainer.state.fn == "fit" and "averaging_state" in checkpoint:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
