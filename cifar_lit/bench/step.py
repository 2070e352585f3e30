"""`cifar-lit bench step`: what the Trainer adds to a recipe's training steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import copy, deepcopy

from cifar_lit.bench.plain import BareLoop
from cifar_lit.bench.report import publish, spread
from cifar_lit.bench.training import LINEAR, Round, Stopwatch, add_training_arguments, fit, subject_from
from cifar_lit.errors import UsageError
from cifar_lit.text import note

WHAT = (
    "Training images/s under the Trainer, with bar, TensorBoard, metrics and checkpoints on, against a bare PyTorch loop with "
    "the same net, weights, batches, precision, optimizer and schedule. Both take turns in one process, so that what else the "
    "machine does meets both. Without --recipe the net is a single layer, which shows the Trainer's own cost."
)
SECONDS, MAX_STEPS = 90.0, 100  # a measurement takes about so long, in rounds of at most so many steps
TRIAL_STEPS = 10  # of which the first two warm up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe=None)
    text = f"of each in a round; if not given, what takes about {SECONDS:.0f} s in all, at most {MAX_STEPS}"
    parser.add_argument("--steps", type=int, help=text)
    parser.add_argument("--rounds", type=int, default=20, help="rounds, after one to warm up")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 2 or (settings.steps is not None and settings.steps < 1):
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1")
    if not settings.recipe and not settings.net:
        settings.net = LINEAR
    subject = subject_from(settings)
    epoch = max(1, len(subject.data.split[0]) // subject.data.batch_size)
    trial = Stopwatch(TRIAL_STEPS - 2, 1, warmup=2)
    fit(subject._replace(model=deepcopy(subject.model), data=copy(subject.data)), trial, max_epochs=-(-TRIAL_STEPS // epoch))
    per_step = trial.rounds[0].ours / trial.rounds[0].steps
    if settings.steps is None:
        settings.steps = max(1, min(MAX_STEPS, int(SECONDS / (2 * per_step * (settings.rounds + 1)))))
    steps = settings.steps * (settings.rounds + 1)
    note(f"this takes about {2 * per_step * steps:,.0f} s: {settings.rounds} rounds of {settings.steps} steps")
    turns = Stopwatch(
        settings.steps, settings.rounds, settings.steps, lambda trainer, model: BareLoop(trainer, model, subject.data).take
    )
    # no longer than that, so that schedules (of rates, of image sizes) run through whole while they are measured
    settings.precision = fit(subject, turns, max_epochs=-(-steps // epoch))
    report("step", settings, turns.rounds, "bare loop", f"{settings.steps} steps each")


def report(name: str, settings: argparse.Namespace, rounds: Sequence[Round], other: str, turns: str) -> None:
    """Prints and writes the speed of ours and of `other`, and their ratio in each round; `turns`: what a round was of each."""
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
