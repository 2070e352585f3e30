"""Two trainings in turn: the Trainer's, and between its steps a plain loop's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


@dataclass
class Rounds:
    """Seconds a step of ours and of the plain loop, one pair a round."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """Median seconds a step of ours and of the plain loop."""
        return statistics.median(self.ours), statistics.median(self.plain)

    def ratio(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of plain / ours over the rounds: above 1 ours is faster."""
        ratios = [plain / ours for ours, plain in zip(self.ours, self.plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return low, middle, high


class Interleave(Callback):
    """After every `steps` steps of the Trainer, runs as many of `plain`; the first round of each warms up.

    plain: makes one step of the plain loop at each call. rounds: how many are counted before the fit is stopped.
    """

    def __init__(self, plain: Callable[[], None], steps: int, rounds: int) -> None:
        self._plain, self._steps, self._wanted = plain, steps, rounds
        self._count = 0
        self._warm = False
        self._resumed_at = 0.0
        self.rounds = Rounds()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the first round."""
        self._resumed_at = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> Any:
        """Skips the rest of the epoch when all rounds are done."""
        return -1 if trainer.should_stop else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a round when its steps are done."""
        self._count += 1
        if self._count % self._steps:
            return
        ours = time.perf_counter() - self._resumed_at
        started = time.perf_counter()
        for _ in range(self._steps):
            self._plain()
        plain = time.perf_counter() - started
        if self._warm:
            self.rounds.ours.append(ours / self._steps)
            self.rounds.plain.append(plain / self._steps)
        self._warm = True
        trainer.should_stop = len(self.rounds.ours) >= self._wanted
        self._resumed_at = time.perf_counter()
