"""Checkpoints within an epoch, every so many steps or minutes."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from cifar_lit.errors import UsageError
from cifar_lit.training.callbacks import may_save

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Interval(NamedTuple):
    """How often a checkpoint is written: every `steps` optimizer steps, or every `seconds`; the other is 0."""

    steps: int = 0
    seconds: float = 0.0


def interval(text: str | int) -> Interval:
    """Reads `500` (steps), `10m`, `90s` or `1.5h`; raises UsageError for anything else and for nothing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(text))
    if match:
        number, unit = float(match[1]), match[2]
        if unit and number > 0:
            return Interval(seconds=number * UNITS[unit])
        if not unit and number >= 1 and number == int(number):
            return Interval(steps=int(number))
    raise UsageError(f"--checkpoint-every is a number of steps (500) or a time (10m, 90s, 1h), not {text}")


class RegularCheckpoint(Checkpoint):
    """Writes `last.ckpt` within epochs; their ends are left to `last`, a ModelCheckpoint.

    Counted from the start and, in a resumed run, from its checkpoint. Where steps are made several a call, or gradients
    wait for more batches, it is written after the next update that ends a call. A time is the first device's.
    It is a `Checkpoint` so that the Trainer calls it after the callbacks that change what is saved.
    """

    takes_chunks = True

    def __init__(self, every: Interval, last: ModelCheckpoint) -> None:
        self._every, self._last = every, last
        self._step, self._time = 0, 0.0

    def _saved(self, trainer: pl.Trainer) -> None:
        self._step, self._time = trainer.global_step, time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counting begins."""
        self._saved(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counting begins again, as the end of an epoch is saved anyway."""
        self._saved(trainer)

    def _due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        if self._every.steps:
            return trainer.global_step - self._step >= self._every.steps
        due = time.monotonic() - self._time >= self._every.seconds
        if trainer.world_size == 1:
            return due
        agreed = torch.tensor(float(due), device=pl_module.device)
        torch.distributed.broadcast(agreed, 0)  # clocks differ, and all devices take part in a checkpoint
        return bool(agreed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the checkpoint when it is due."""
        if not may_save(trainer, pl_module):
            return
        if self._due(trainer, pl_module):
            trainer.save_checkpoint(f"{self._last.dirpath}/last.ckpt")
            self._saved(trainer)
