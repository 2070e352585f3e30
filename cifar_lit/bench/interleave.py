"""Two trainings in turn: the Trainer's, and between its steps or its epochs that of a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.apart import take
from cifar_lit.bench.clock import read_clock

# Starts the other training, given ours before its first step; it yields after each turn with the images of that turn.
StartLoop = Callable[[pl.Trainer, Any], Iterator[int]]


class Round(NamedTuple):
    """One turn of each: optimizer steps and training images of either, seconds of ours and of the plain loop."""

    steps: int
    images: int
    ours: float
    plain: float


class Interleave(Callback):
    """After every `steps` steps of the Trainer, runs as many of the plain loop; the first round of each warms up.

    start: makes the plain loop, which yields after every step with the number of its images. rounds: how many are
    counted before the fit is stopped. Where one call of `training_step` makes several optimizer steps, a round ends
    with the first call that completes it, and the plain loop makes as many.
    """

    takes_chunks = True

    def __init__(self, start: StartLoop, steps: int, rounds: int) -> None:
        self._start, self._steps, self._wanted = start, steps, rounds
        self._plain: Iterator[int] | None = None
        self._warm = False
        self._resumed_at, self._resumed_at_step = 0.0, 0
        self.rounds: list[Round] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the plain loop and the first round; by now everything is where and as the training begins."""
        if self._plain is None:
            self._plain = self._start(trainer, pl_module)
            self._resumed_at = read_clock(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a round when its steps are done."""
        steps = trainer.global_step - self._resumed_at_step
        if steps < self._steps or trainer.should_stop:
            return
        assert self._plain is not None
        device = pl_module.device
        paused_at = read_clock(device)
        images = take(self._plain, steps)
        ended_at = read_clock(device)
        if self._warm:
            self.rounds.append(Round(steps, images, paused_at - self._resumed_at, ended_at - paused_at))
        self._warm = True
        trainer.should_stop = len(self.rounds) >= self._wanted
        self._resumed_at_step = trainer.global_step
        self._resumed_at = read_clock(device)


class InterleaveEpochs(Callback):
    """After every epoch of the Trainer with its validation, and all that it does at its end, one of the plain loop.

    start: makes the plain loop, which yields after every epoch with its evaluation, with the number of training images.
    """

    takes_chunks = True

    def __init__(self, start: StartLoop) -> None:
        self._start = start
        self._plain: Iterator[int] | None = None
        self._resumed_at, self._resumed_at_step = 0.0, 0
        self.rounds: list[Round] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the plain loop, off the clock."""
        self._plain = self._start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the epoch before, if there was one, and starts this."""
        if trainer.global_step > self._resumed_at_step:
            self._take_turn(trainer, pl_module)
        self._resumed_at = read_clock(pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the last epoch."""
        self._take_turn(trainer, pl_module)

    def _take_turn(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._plain is not None
        paused_at = read_clock(pl_module.device)
        images = take(self._plain, 1)
        ended_at = read_clock(pl_module.device)
        steps = trainer.global_step - self._resumed_at_step
        self.rounds.append(Round(steps, images, paused_at - self._resumed_at, ended_at - paused_at))
        self._resumed_at_step = trainer.global_step
