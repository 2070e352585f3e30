"""Clocks that wait for the device: one to read, and one for the steps of a fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


def read_clock(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


class Lap(NamedTuple):
    """Some steps of a training: how many, of how many images, in how many seconds."""

    steps: int
    images: int
    seconds: float


class Stopwatch(Callback):
    """Times `laps` laps of a fit, each of at least `steps` optimizer steps, after `warmup` of them; then ends the fit.

    between: called, off the clock, with the number of the lap that is about to start, and once more after the last.
    One call of `training_step` may stand for several optimizer steps: they are counted by `global_step`.
    """

    takes_chunks = True

    def __init__(self, warmup: int, steps: int, laps: int, between: Callable[[int], None] = lambda lap: None) -> None:
        self._steps, self._wanted, self._between = [warmup, *[steps] * laps], laps, between
        self._started_at_step, self._images, self._started = 0, 0, 0.0
        self._running = False  # whether the warm-up is over
        self.laps: list[Lap] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a lap when its steps are done."""
        if trainer.should_stop:
            return
        self._images += batch.labels.numel()
        steps = trainer.global_step - self._started_at_step
        if steps < self._steps[len(self.laps) + self._running]:
            return
        now = read_clock(pl_module.device)
        if self._running:
            self.laps.append(Lap(steps, self._images, now - self._started))
        self._running = True
        self._between(len(self.laps))
        trainer.should_stop = len(self.laps) >= self._wanted
        self._started_at_step, self._images = trainer.global_step, 0
        self._started = read_clock(pl_module.device)
