"""Time the steps of the program's own `fit`, in turn with another loop."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from cifar_lit.cli import main
from cifar_lit.data.image_set import Batch


class Round(NamedTuple):
    """A turn of ours and of another loop: optimizer steps and training images of ours, seconds of each."""

    steps: int
    images: int
    ours: float
    other: float


class Stopwatch(Callback):
    """Time rounds of a fit and of another loop in turn, after a warm-up; then end the fit.

    Attributes:
        latest: the watch of the latest fit.
        rounds: the rounds so far.

    Args:
        steps: optimizer steps in a round.
        count: number of rounds.
        warmup: steps before the first round, at least 1.
    """

    latest: ClassVar[Stopwatch]

    def __init__(self, steps: int, count: int, warmup: int) -> None:
        Stopwatch.latest = self
        self._steps, self._count = steps, count
        self.warmup = warmup
        self.rounds: list[Round] = []
        self.description: dict[str, object] = {}

    def start_other(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Start the other loop, when model and data are in place. Here is none."""

    def take_turn(self, steps: int) -> None:
        """Train that many steps of the other loop."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the other loop and the warm-up."""
        self.description = {"batch_size": trainer.datamodule.batch_size, "precision": str(trainer.precision)}  # type: ignore[attr-defined]
        self.steps_per_epoch = int(trainer.num_training_batches)
        self.start_other(trainer, pl_module)
        self._warm = False
        self._begin_round(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """End a round after its steps, and give the other loop its turn."""
        self._images += batch.labels.numel()
        steps = trainer.global_step - self._begun_at
        due = self.warmup
        if self._warm:
            due = self._steps
        if steps < due:
            return
        paused = read_clock(pl_module.device)
        self.take_turn(steps)
        if self._warm:
            other = read_clock(pl_module.device) - paused
            self.rounds.append(Round(steps, self._images, paused - self._begun, other))
        self._warm = True
        trainer.should_stop = len(self.rounds) == self._count
        self._begin_round(trainer)

    def _begin_round(self, trainer: pl.Trainer) -> None:
        self._images = 0
        self._begun_at = trainer.global_step
        self._begun = read_clock(trainer.strategy.root_device)


def read_clock(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


def timed(words: Sequence[str], kind: str, steps: int, count: int, warmup: int) -> Stopwatch:
    """Run `cifar-lit fit` with these words and a stopwatch of a kind; return the stopwatch.

    All that a run has takes part: metrics, logger, checkpoints. Exit if the command fails.
    """
    fit_with(words, kind, steps=steps, count=count, warmup=warmup)
    return Stopwatch.latest


def fit_with(words: Sequence[str], kind: str, **settings: int) -> None:
    """Run `cifar-lit fit` with these words and a callback, given by its import path. Exit if the command fails."""
    watch = [f"--trainer.callbacks+={kind}"]
    watch += [f"--trainer.callbacks.{name}={value}" for name, value in settings.items()]
    without_validation = ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    with (
        TemporaryDirectory() as logs,
        Path(os.devnull).open("w", encoding="utf-8") as devnull,
        redirect_stdout(devnull),
    ):
        code = main(["fit", *words, *without_validation, f"--logs={logs}", *watch])
    if code:
        raise SystemExit(code)
