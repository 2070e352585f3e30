"""`cifar-lit bench step`: what the Trainer adds to a recipe's training steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress

from cifar_lit.bench.plain import BareLoop
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import publish, spread
from cifar_lit.bench.training import (
    LINEAR,
    MAX_STEPS,
    SECONDS,
    Round,
    StartOther,
    Stopwatch,
    add_training_arguments,
    fit,
    subject_from,
)
from cifar_lit.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Training images/s under the Trainer, with bar, TensorBoard, metrics and checkpoints on, against a bare PyTorch loop with "
    "the same net, weights, batches, precision, optimizer and schedule. Both take turns in one process, so that what else the "
    "machine does meets both. Without --recipe the net is a single layer, which shows the Trainer's own cost."
)
WARMUP = 2  # steps before the trial of how long they take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe=None)
    add_turn_arguments(parser, rounds=20)


def add_turn_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """How much is measured."""
    text = f"of each in a round; if not given, what takes about {SECONDS:.0f} s in all, at most {MAX_STEPS}"
    parser.add_argument("--steps", type=int, help=text)
    text = "rounds, after a warm-up; without --steps fewer where steps are slow"
    parser.add_argument("--rounds", type=int, default=rounds, help=text)


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 2 or (settings.steps is not None and settings.steps < 1):
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1")
    if not settings.recipe and not settings.net:
        settings.net = LINEAR
    subject = subject_from(settings)
    turns = turns_of(settings, lambda trainer, model: BareLoop(trainer, model, subject.data).take)
    with suppress(Interrupted):
        settings.precision = fit(subject, turns, max_epochs=100_000)
    settings.steps = turns.steps
    report("step", settings, turns.rounds, "bare loop", f"{settings.steps} step{'s' * (settings.steps != 1)} of each")


def turns_of(settings: argparse.Namespace, start_other: StartOther) -> Stopwatch:
    """Rounds as the flags of `add_turn_arguments` say."""
    warmup = settings.steps or WARMUP
    return Stopwatch(settings.steps, settings.rounds, warmup, start_other, progress=Progress(settings.rounds, "round"))


def report(name: str, settings: argparse.Namespace, rounds: Sequence[Round], other: str, turns: str) -> None:
    """Prints and writes the speed of ours and of `other`, and their ratio in each round; `turns`: what a round was of each.

    Does nothing where the measurement was stopped before the first of them was over.
    """
    if not rounds:
        return
    sides = [("ours", [turn.ours for turn in rounds]), (other, [turn.other for turn in rounds])]
    speeds = [
        (side, spread(turn.images / own for turn, own in zip(rounds, seconds, strict=True)), "images/s")
        for side, seconds in sides
    ]
    times = [
        (f"{side}, a step", spread(1e3 * own / turn.steps for turn, own in zip(rounds, seconds, strict=True)), "ms")
        for side, seconds in sides
    ]
    ratio = (f"ours / {other}", spread(turn.other / turn.ours for turn in rounds), "×")
    trained = " · ".join(filter(None, (settings.recipe, settings.net, settings.dataset)))
    publish(
        name,
        vars(settings),
        f"{trained} · batch {settings.batch_size} · ours in {settings.precision}",
        [*speeds, *times, ratio],
        f"of {len(rounds)} rounds of {turns}, in turn",
        rounds=len(rounds),
    )
