"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from cifar_lit.base.errors import UsageError
from cifar_lit.models.registry import with_versions

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier


@final
class WeightAverage(EMAWeightAveraging):
    """Validate and save a moving average of the weights, which includes the running statistics of norms.

    It is removed after the fit. If it remained, a test by the same Trainer would score the average, or the *current*
    weights of a checkpoint.

    Args:
        decay: decay per step, above 0 and below 1.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay, use_buffers=True)
        self.decay = decay

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Convert the average to float64 if the weights are: a swap or a resume would round them."""
        if self._average_model is not None and pl_module.dtype == torch.float64:
            self._average_model.module.double()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: ImageClassifier, checkpoint: dict[str, Any]) -> None:
        """Save average and current weights."""
        self._follow_new_weights(pl_module)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["state_dict"] = with_versions(pl_module, checkpoint["state_dict"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the average into the model."""
        self._follow_new_weights(pl_module)
        super().on_train_end(trainer, pl_module)
        self._average_model = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, checkpoint: dict[str, object]
    ) -> None:
        """Restore average and current weights when a fit is resumed."""
        if trainer.state.fn != "fit":
            return
        if "averaging_state" not in checkpoint:
            raise UsageError("weight_average cannot be added on resume: start a new run")
        self.on_fit_start(trainer, pl_module)
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def _follow_new_weights(self, pl_module: pl.LightningModule) -> None:
        """Before the first step, set the average to the current weights: a feature may have replaced them."""
        if self._average_model is not None and not self._average_model.n_averaged:
            self._average_model.module.load_state_dict(pl_module.state_dict())
