"""`cifar-lit bench hand`: a recipe's whole training by a bare loop, for its time and accuracy beside `bench recipe`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.clock import read_clock
from cifar_lit.bench.curve import accuracy_of, undisturbed
from cifar_lit.bench.plain import BareLoop
from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures
from cifar_lit.bench.summary import mean_text
from cifar_lit.bench.training import add_training_arguments, fit, subject
from cifar_lit.bench.training_run import images_held
from cifar_lit.errors import UsageError
from cifar_lit.runs.compare import mean_interval

WHAT = (
    "Whole trainings of a recipe by a bare PyTorch loop, each step launched by hand, with the same net, batches, precision, "
    "optimizer and schedule: the time and the test accuracy that `bench recipe NAME` is to be compared with."
)


class WholeLoop(Callback):
    """Before the Trainer's first step runs the bare loop for the whole training, tests it, and ends the fit after that step.

    seconds: of the loop, set-up and test not included. accuracy: on the test images, without test-time views.
    """

    takes_chunks = True

    def __init__(self) -> None:
        self.seconds = self.accuracy = float("nan")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """By now the net is initialised, on its device, and the images are where they are trained on."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        loop = BareLoop(trainer, pl_module, data)
        total = (trainer.max_epochs or 1) * pl_module.batches_per_epoch()
        started = read_clock(pl_module.device)
        steps = loop.steps()
        for _ in range(total):
            next(steps)
        self.seconds = read_clock(pl_module.device) - started
        trained = loop.average.module if loop.average is not None else loop.net
        pl_module.net.load_state_dict(trained.state_dict())
        with undisturbed(trainer, pl_module):
            self.accuracy = accuracy_of(trainer, pl_module, data.test_dataloader())
        trainer.should_stop = True


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="laptop")
    parser.add_argument("--runs", type=int, default=3, help="trainings, each with a seed of its own")
    parser.add_argument("--epochs", type=int | None, default=None, help="other than the recipe's")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.runs < 1 or (settings.epochs is not None and settings.epochs < 1):
        raise UsageError("a measurement takes at least --runs 1, of --epochs 1")
    seconds, accuracies = [], []
    with images_held():
        for seed in range(settings.runs):
            what, whole = subject(settings, seed), WholeLoop()
            settings.precision = fit(what, whole, max_epochs=settings.epochs or what.epochs)
            seconds.append(whole.seconds)
            accuracies.append(whole.accuracy)
            print(f"seed {seed}: test accuracy {whole.accuracy:.4f} in {whole.seconds:.2f} s", file=sys.stderr, flush=True)
            del what
            gc.collect()
    timed = seconds[1:] or seconds
    found, times = mean_interval(accuracies), spread(timed)
    figures = {
        "bench": "hand",
        "settings": settings_of(settings),
        "environment": environment(),
        "accuracy": found,
        "seconds": times,
        **headline(
            (f"{settings.recipe} by a bare loop, n = {found['n']}", times, "s"),
            ("its test accuracy, mean", 100 * found["mean"], "%"),
        ),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    columns = ["recipe", "n", "test accuracy", "train s, warm"]
    rows = [[str(settings.recipe), str(found["n"]), mean_text(found), shown_spread(times, ",.2f")]]
    show(f"bench hand · {settings.recipe} · {settings.dataset}", columns, rows, footer(figures))
