"""Where a rank's main thread is in its training, so that one which hangs is told from those that wait for it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.distributed.rank_watch import RankWatch


class RankProgress(Callback):
    """Tells the watch how far this rank is: all go through the same positions (fits and evaluations, epoch, part, step)."""

    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch
        self._stages = 0

    def _move(self, trainer: pl.Trainer, part: int, step: int = 0) -> None:
        self._watch.position = [self._stages, trainer.current_epoch, part, step]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """A fit, or an evaluation of its own, begins."""
        self._stages += 1
        self._move(trainer, 0)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """A step begins, in which the ranks share their gradients."""
        self._move(trainer, 0, batch_idx + 1)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Each rank looks at its own images."""
        self._move(trainer, 1)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The ranks' predictions are put together."""
        self._move(trainer, 2)

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
