"""`cifar-lit bench tutorial`: a tutorial's recipe against its hand-written loop."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.plain import TutorialLoop
from cifar_lit.bench.step import Interleave, Round, StartLoop, report
from cifar_lit.bench.training import add_training_arguments, fit, read_clock, subject_from
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "A tutorial's recipe under the Trainer against the tutorial's hand-written loop: PIL images, a DataLoader without workers, "
    "float32, plain SGD, in a process of its own. In turn by some steps of each; or, with --epochs, by whole epochs of each with "
    "the evaluation that ends them, on the same training and validation images: training images over the wall time of the epoch "
    "with its validation."
)


class InterleaveEpochs(Callback):
    """After every epoch of the Trainer with its validation, and all that it does at its end, has the plain loop make one.

    start: makes the plain loop, whose turns are epochs with their evaluation.
    """

    def __init__(self, start: StartLoop) -> None:
        self._start = start
        self.rounds: list[Round] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the plain loop, off the clock."""
        self._plain = self._start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the epoch before, if there was one, and starts this."""
        if trainer.current_epoch:
            self.on_train_end(trainer, pl_module)
        self._started, self._started_at = read_clock(pl_module.device), trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends an epoch, in the end the last one."""
        paused = read_clock(pl_module.device)
        images = self._plain(1)
        steps = trainer.global_step - self._started_at
        self.rounds.append(Round(steps, images, paused - self._started, read_clock(pl_module.device) - paused))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="tudui")
    parser.add_argument("--steps", type=int, default=50, help="steps of each in a round")
    parser.add_argument("--rounds", type=int, default=8, help="rounds, after one to warm up")
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs of each with validation, in place of steps")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.epochs < 0 or settings.rounds < 2 or settings.steps < 1:
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1, or --epochs 1")
    subject = subject_from(settings)
    data, hparams = subject.data, subject.model.hparams
    if settings.epochs and not len(data.split[1]):
        raise UsageError("there is nothing to validate on: this recipe's data.val_size is 0")
    net = deepcopy(subject.model.net)
    for parameter in net.parameters():  # in the memory order that it comes in, as the tutorials leave it
        parameter.data = parameter.data.contiguous(memory_format=torch.contiguous_format)
    loop = TutorialLoop(data.train_images, data.split, net, data.batch_size, hparams["lr"], hparams["momentum"], *data.statistics)

    def start(trainer: pl.Trainer, model: Any) -> Callable[[int], int]:
        return in_other_process(loop, "epochs" if settings.epochs else "steps", model.device)

    turns = InterleaveEpochs(start) if settings.epochs else Interleave(start, settings.steps, settings.rounds)
    settings.precision = fit(subject, turns, max_epochs=settings.epochs or 100_000, validates=settings.epochs > 0)
    epoch = f"an epoch of {len(data.split[0]):,} images with the evaluation of {len(data.split[1]):,}"
    of = epoch if settings.epochs else f"{settings.steps} steps each"
    report("tutorial", settings, turns.rounds, "the tutorial's loop, float32", of)


def in_other_process(loop: TutorialLoop, turns: str, device: torch.device) -> Callable[[int], int]:
    """Starts a loop in a process of its own; what it returns has some turns made there, and returns the images of them.

    The Trainer's process keeps the memory that it frees (`cifar_lit.hardware`); a loop in it would gain by that too.

    Args:
        loop: takes as many threads as this process, and ends with it.
        turns: "steps" or "epochs", the method of the loop that makes them.
        device: where it trains.

    Raises:
        Failure: the process has ended.
    """
    ours, theirs = mp.get_context("spawn").Pipe()
    arguments = (theirs, loop, turns, device, torch.get_num_threads())
    process = mp.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    process.start()
    theirs.close()

    def take(count: int) -> int:
        try:
            ours.send(count)
            return int(ours.recv())
        except (EOFError, OSError):
            process.join()
            code = process.exitcode
            raise Failure(f"the process of the hand-written loop ended with exit code {code}: what it printed says why") from None

    take(0)  # comes back when it has the images and has started
    return take


def _serve(connection: Connection, loop: TutorialLoop, turns: str, device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    running = getattr(loop, turns)(device)
    try:
        while True:
            images = sum(islice(running, connection.recv()))
            read_clock(device)
            connection.send(images)
    except EOFError:
        return
