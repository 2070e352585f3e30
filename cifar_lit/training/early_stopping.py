"""Early stopping (`model.patience`)."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping


class EarlyStop(EarlyStopping):
    """Lightning's EarlyStopping on a validation score. On resume, the given patience replaces the checkpoint's.

    Args:
        monitor: name of the score.
        mode: min or max.
        patience: validations without a better score; below 1, a share of the epochs.
        max_epochs: epochs of the fit. Without a limit, a share never ends the training.
    """

    def __init__(self, monitor: str, mode: str, patience: float, max_epochs: int | None) -> None:
        share = math.ceil(patience * max_epochs) if max_epochs and max_epochs > 0 else 2**31
        validations = share if patience < 1 else math.ceil(patience)
        super().__init__(
            monitor, mode=mode, patience=validations, strict=False, check_finite=False, check_on_train_epoch_end=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all but the patience."""
        super().load_state_dict({**state_dict, "patience": self.patience})
