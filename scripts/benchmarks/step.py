"""Overhead of the Trainer in a recipe's training steps: python scripts/benchmarks/step.py --recipe cpu91."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from loops import BareLoop
from progress import Progress
from report import publish, spread
from script import run_script
from timed_fit import LINEAR, Stopwatch, add_training_arguments, default_warmup, fit, subject_from

from cifar_lit.base.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Compare training images/s under the Trainer, with bar, TensorBoard, metrics and checkpoints on, with a bare "
    "PyTorch loop that has the same net, weights, batches, precision, optimizer and schedule. Both take turns in one "
    "process. On a GPU, both compile their net if the recipe does. "
    "Without --recipe the net is a single layer, which isolates the overhead of the Trainer."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    add_training_arguments(parser, recipe=None)
    parser.add_argument("--steps", type=int, default=10, help="steps of each loop in a round")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds")
    parser.add_argument(
        "--warmup", type=int, help="warm-up steps of each loop; default: --steps after the whitening schedule"
    )


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if min(settings.steps, settings.rounds, 1 if settings.warmup is None else settings.warmup) < 1:
        raise UsageError("--steps, --rounds and --warmup must be at least 1")
    if not settings.recipe and not settings.net:
        settings.net = LINEAR
    subject = subject_from(settings, settings.flags)
    settings.warmup = settings.warmup or default_warmup(subject, settings.steps)

    def start(trainer: Any, model: Any) -> Callable[[int], int]:
        return BareLoop(trainer, model, subject.data).take

    progress = Progress(settings.rounds, "round")
    watch = Stopwatch(settings.steps, settings.rounds, settings.warmup, start, progress)
    with suppress(Interrupted):
        settings.precision = fit(subject, watch)
    rounds = watch.rounds
    if not rounds:
        return
    speeds = [
        ("ours", spread(turn.images / turn.ours for turn in rounds), "images/s"),
        ("bare loop", spread(turn.images / turn.other for turn in rounds), "images/s"),
    ]
    times = [
        ("ours, a step", spread(1e3 * turn.ours / turn.steps for turn in rounds), "ms"),
        ("bare loop, a step", spread(1e3 * turn.other / turn.steps for turn in rounds), "ms"),
    ]
    ratio = ("ours / bare loop", spread(turn.other / turn.ours for turn in rounds), "×")
    trained = " · ".join(filter(None, (settings.recipe, settings.net, settings.dataset)))
    publish(
        "step",
        vars(settings),
        f"{trained} · batch {settings.batch_size} · ours in {settings.precision}",
        [*speeds, *times, ratio],
        f"{len(rounds)} rounds of {settings.steps} steps of each, in turn",
        rounds=len(rounds),
    )


if __name__ == "__main__":
    raise SystemExit(run_script())
