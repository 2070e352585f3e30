"""`cifar-lit bench tutorial`: a tutorial's recipe against its hand-written loop."""

from __future__ import annotations

from contextlib import ExitStack, closing
from copy import deepcopy

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.plain import TutorialLoop
from cifar_lit.bench.step import Interleave, InterleaveEpochs, report
from cifar_lit.bench.subprocess_loop import SubprocessLoop
from cifar_lit.bench.training import add_training_arguments, fit, subject_from
from cifar_lit.errors import UsageError

WHAT = (
    "A tutorial's recipe under the Trainer against the tutorial's hand-written loop: PIL images, a DataLoader without workers, "
    "float32, plain SGD, in a process of its own. In turn by some steps of each; or, with --epochs, by whole epochs of each with "
    "the evaluation that ends them, on the same training and validation images: training images over the wall time of the epoch "
    "with its validation."
)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="tudui")
    parser.add_argument("--steps", type=int, default=50, help="steps of each in a round")
    parser.add_argument("--rounds", type=int, default=8, help="rounds, after one to warm up")
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs of each with validation, in place of steps")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.epochs < 0 or settings.rounds < 2 or settings.steps < 1:
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1, or --epochs 1")
    subject = subject_from(settings)
    model, data = subject.model, subject.data
    if settings.epochs and not len(data.split[1]):
        raise UsageError("there is nothing to validate on: this recipe's data.val_size is 0")
    net = deepcopy(model.net)
    for parameter in net.parameters():  # in the memory order that it comes in, as the tutorials leave it
        parameter.data = parameter.data.contiguous(memory_format=torch.contiguous_format)
    rate, momentum = model.hparams["lr"], model.hparams["momentum"]
    loop = TutorialLoop(data.train_images, data.split, net, data.batch_size, rate, momentum, *data.statistics)
    if settings.epochs:
        kind, of = "epochs", f"an epoch of {len(data.split[0]):,} images with the evaluation of {len(data.split[1]):,}"
    else:
        kind, of = "steps", f"{settings.steps} steps each"
    with ExitStack() as stack:

        def start(trainer: pl.Trainer, model: pl.LightningModule) -> SubprocessLoop:
            return stack.enter_context(closing(SubprocessLoop(loop, kind, model.device)))

        turns = InterleaveEpochs(start) if settings.epochs else Interleave(start, settings.steps, settings.rounds)
        settings.precision = fit(subject, turns, max_epochs=settings.epochs or 100_000, validates=settings.epochs > 0)
    report("tutorial", settings, turns.rounds, "the tutorial's loop, float32", of)
