"""Compare `tudui` with the tutorial's hand-written loop: python scripts/benchmarks/tutorial.py --data-dir DATA."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from loops import TutorialLoop, lay_out_plainly, leave_signals
from script import run_script
from step import report
from timed_fit import EpochStopwatch, add_data_arguments, fit, read_clock, subject_from

from cifar_lit.bench.progress import Progress
from cifar_lit.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Compare the recipe `tudui` under the Trainer with the tutorial's loop: PIL images, a DataLoader without workers,"
    " float32, plain SGD, in its own process. Whole epochs take turns, each with its validation, on the same images."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(recipe="tudui", net=None, lr=None, batch_size=None, precision=None)
    add_data_arguments(parser)
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each loop")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.epochs < 1:
        raise UsageError(f"--epochs must be at least 1, not {settings.epochs}")
    subject = subject_from(settings)
    data, hparams = subject.data, subject.model.hparams
    net = deepcopy(subject.model.net)
    lay_out_plainly(net)
    loop = TutorialLoop(
        data.train_images, data.split, net, data.batch_size, hparams["lr"], hparams["momentum"], *data.statistics
    )
    watch = EpochStopwatch(
        settings.epochs, lambda trainer, model: in_other_process(loop, model), Progress(settings.epochs, "epoch")
    )
    with suppress(Interrupted):
        settings.precision = fit(subject, watch, max_epochs=settings.epochs, validates=True)
    epoch = f"an epoch of {len(data.split[0]):,} images with the evaluation of {len(data.split[1]):,}"
    report("tutorial", settings, watch.rounds, "the tutorial's loop, float32", epoch)


def in_other_process(loop: TutorialLoop, model: pl.LightningModule) -> Callable[[int], Any]:
    """Start a loop in its own process with as many threads; return a function that trains an epoch there.

    The Trainer's process keeps freed memory (`cifar_lit.hardware`), which would speed up a loop in that process too.
    """
    ours, theirs = get_context("spawn").Pipe()
    arguments = (theirs, loop, model.device, torch.get_num_threads())
    get_context("spawn").Process(target=serve, args=arguments, daemon=True).start()
    theirs.close()
    ours.recv()  # the process is ready

    def train_epoch(steps: int) -> None:
        ours.send(steps)
        ours.recv()

    return train_epoch


def serve(connection: Connection, loop: TutorialLoop, device: torch.device, threads: int) -> None:
    """Train and evaluate an epoch for every message."""
    leave_signals(0)
    torch.set_num_threads(threads)
    epochs = loop.epochs(device)
    connection.send(None)
    with suppress(EOFError):  # the measurement is over
        while True:
            connection.recv()
            next(epochs)
            connection.send(read_clock(device))


if __name__ == "__main__":
    raise SystemExit(run_script())
