"""`cifar-lit bench tutorial`: a tutorial's recipe against its hand-written loop."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp

from cifar_lit.bench.plain import TutorialLoop, lay_out_plainly
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.step import add_turn_arguments, report, turns_of
from cifar_lit.bench.training import EpochStopwatch, add_training_arguments, fit, read_clock, subject_from
from cifar_lit.errors import Failure, UsageError
from cifar_lit.signals import start_resource_tracker
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "A tutorial's recipe under the Trainer against the tutorial's hand-written loop: PIL images, a DataLoader without workers, "
    "float32, plain SGD, in a process of its own. In turn by some steps of each; or, with --epochs, by whole epochs of each with "
    "the evaluation that ends them, on the same training and validation images: training images over the wall time of the epoch "
    "with its validation."
)

# Settings that this loop does not have: where a recipe's differ from their defaults, both would not train the same.
ABSENT = (
    *("optimizer", "nesterov", "weight_decay", "schedule", "warmup_epochs", "label_smoothing", "class_weights", "ema_decay"),
    *("fixed_norms", "weights", "frozen", "input_lr", "shuffle", "sampling", "crop", "flip", "cutout", "resolutions", "augment"),
    "skip_easy",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="tudui")
    add_turn_arguments(parser, rounds=8)
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs of each with validation, in place of steps")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.epochs < 0 or settings.rounds < 2 or (settings.steps is not None and settings.steps < 1):
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1, or --epochs 1")
    subject = subject_from(settings, ABSENT)
    data, hparams, by_epoch = subject.data, subject.model.hparams, settings.epochs > 0
    if by_epoch and not len(data.split[1]):
        raise UsageError("there is nothing to validate on: this recipe's data.val_size is 0")
    net = deepcopy(subject.model.net)
    lay_out_plainly(net)
    loop = TutorialLoop(data.train_images, data.split, net, data.batch_size, hparams["lr"], hparams["momentum"], *data.statistics)

    def start(trainer: pl.Trainer, model: Any) -> Callable[[int], int]:
        take = in_other_process(loop, by_epoch, model.device)
        return (lambda steps: take(1)) if by_epoch else take

    turns = EpochStopwatch(start, Progress(settings.epochs, "epoch")) if by_epoch else turns_of(settings, start)
    try:
        with suppress(Interrupted):
            settings.precision = fit(subject, turns, max_epochs=settings.epochs or 100_000, validates=by_epoch)
    finally:
        for process in mp.active_children():
            process.kill()
            process.join()
    settings.steps = None if by_epoch else turns.steps
    epoch = f"an epoch of {len(data.split[0]):,} images with the evaluation of {len(data.split[1]):,}"
    of = epoch if by_epoch else f"{settings.steps} step{'s' * (settings.steps != 1)} of each"
    report("tutorial", settings, turns.rounds, "the tutorial's loop, float32", of)


def in_other_process(loop: TutorialLoop, by_epoch: bool, device: torch.device) -> Callable[[int], int]:
    """Starts a loop in a process of its own, with as many threads; what it returns makes so many steps, or epochs, there.

    The Trainer's process keeps the memory that it frees (`cifar_lit.hardware`); a loop in it would gain by that too.
    It returns the images of these, and raises Failure when the process has ended.
    """
    ours, theirs = mp.get_context("spawn").Pipe()
    arguments = (theirs, loop, by_epoch, device, torch.get_num_threads())
    process = mp.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    start_resource_tracker()  # its start below would unblock the signals again
    # The child inherits the mask: this process answers Ctrl-C and a closed terminal.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
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


def _serve(connection: Connection, loop: TutorialLoop, by_epoch: bool, device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    running = loop.epochs(device) if by_epoch else loop.steps(device)
    try:
        while True:
            images = sum(islice(running, connection.recv()))
            read_clock(device)
            connection.send(images)
    except EOFError:
        return
