"""Early stopping on the validation score of the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier


@final
class EarlyStop(EarlyStopping):
    """Lightning's EarlyStopping on `model.monitor`. On resume, the given patience replaces the checkpoint's.

    Args:
        patience: stop after this many validations without a better score; below 1, after this share of the epochs.
            Without a limit of epochs, a share never ends the training.
    """

    may_change = True  # on resume

    def __init__(self, patience: float) -> None:
        self._given = patience
        super().__init__("val/accuracy")

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Monitor the model's score."""
        if stage != "fit":
            return
        validations = math.ceil(self._given)
        if self._given < 1:
            pl_module.needs_length = "early_stop"
            epochs = trainer.max_epochs or -1
            validations = math.ceil(self._given * epochs) if epochs > 0 else 2**31
        monitor, mode = pl_module.monitored
        # The constructor also resets the score and the count of an earlier fit.
        super().__init__(
            monitor, mode=mode, patience=validations, strict=False, check_finite=False, check_on_train_epoch_end=False
        )
        super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Restore all but the patience."""
        super().load_state_dict({**state_dict, "patience": self.patience})
