"""`cifar-lit bench step`: what the Trainer adds to a recipe's training steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import lightning.pytorch as pl

from cifar_lit.bench.plain import BareLoop
from cifar_lit.bench.report import figures_of, publish, spread, spread_text
from cifar_lit.bench.training import LINEAR, Lap, Stopwatch, Subject, add_training_arguments, fit, read_clock, subject_from
from cifar_lit.errors import UsageError

WHAT = (
    "Training images/s under the Trainer, with bar, TensorBoard, metrics and checkpoints on, against a bare PyTorch loop with "
    "the same net, weights, batches, precision, optimizer and schedule. Both take turns in one process, so that what else the "
    "machine does meets both. Without --recipe the net is a single layer, which shows the Trainer's own cost."
)
SECONDS, MAX_STEPS, TRIAL_STEPS = 90.0, 100, 8  # a measurement takes about so long, in rounds of at most so many steps

# Starts the other loop, given ours before its first step; what it returns makes some turns and returns the images of them.
StartLoop = Callable[[pl.Trainer, Any], Callable[[int], int]]


class Round(NamedTuple):
    """One turn of each: optimizer steps and training images of either, seconds of ours and of the plain loop."""

    steps: int
    images: int
    ours: float
    plain: float


class Interleave(Stopwatch):
    """After every `steps` steps of the Trainer, has the plain loop make as many; the first round of each warms up.

    start: makes the plain loop, whose turns are steps. rounds: how many are counted before the fit is stopped.
    """

    def __init__(self, start: StartLoop, steps: int, rounds: int) -> None:
        super().__init__(steps, steps, rounds, self._run_plain)
        self._start, self._warmup = start, steps
        self.rounds: list[Round] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Makes the plain loop; by now everything is where and as the training begins."""
        if trainer.global_step == 0:
            self._device, self._plain = pl_module.device, self._start(trainer, pl_module)

    def _run_plain(self, lap: Lap | None) -> None:
        started = read_clock(self._device)
        images = self._plain(lap.steps if lap else self._warmup)
        if lap:
            self.rounds.append(Round(lap.steps, images, lap.seconds, read_clock(self._device) - started))


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
    per_step = seconds_per_step(subject)
    if settings.steps is None:
        settings.steps = max(1, min(MAX_STEPS, int(SECONDS / (2 * per_step * (settings.rounds + 1)))))
    steps = settings.steps * (settings.rounds + 1)
    print(f"this takes about {2 * per_step * steps:,.0f} s: {settings.rounds} rounds of {settings.steps} steps", file=sys.stderr)
    turns = Interleave(lambda trainer, model: BareLoop(trainer, model, subject.data).take, settings.steps, settings.rounds)
    # no longer than that, so that schedules (of rates, of image sizes) run through whole while they are measured
    settings.precision = fit(subject, turns, max_epochs=-(-steps // subject.steps_per_epoch))
    report("step", settings, turns.rounds, "bare loop", f"{settings.steps} steps each")


def seconds_per_step(subject: Subject) -> float:
    """Of a few steps under the Trainer, which leave the subject as it is."""
    watch = Stopwatch(2, TRIAL_STEPS, 1)
    trial = subject._replace(model=deepcopy(subject.model), data=copy(subject.data))
    fit(trial, watch, max_epochs=-(-(2 + TRIAL_STEPS) // subject.steps_per_epoch))
    return watch.laps[0].seconds / watch.laps[0].steps


def compared(name: str, settings: argparse.Namespace, rounds: Sequence[Round], other: str) -> dict[str, Any]:
    """The figures: images/s and ms a step of both, and the ratio of ours over `other`, above 1 where ours is faster."""

    def side(seconds: Sequence[float]) -> dict[str, Any]:
        pairs = list(zip(rounds, seconds, strict=True))
        return {
            "images_per_second": spread(turn.images / own for turn, own in pairs),
            "ms_per_step": spread(1e3 * own / turn.steps for turn, own in pairs),
        }

    ours, plain = side([turn.ours for turn in rounds]), side([turn.plain for turn in rounds])
    ratio = spread(turn.plain / turn.ours for turn in rounds)
    return figures_of(
        name,
        vars(settings),
        ("ours", ours["images_per_second"], "images/s"),
        (other, plain["images_per_second"], "images/s"),
        (f"ours / {other}", ratio, "×"),
        rounds=len(rounds),
        ours=ours,
        plain={"what": other, **plain},
        difference_ms_per_step=round(ours["ms_per_step"]["median"] - plain["ms_per_step"]["median"], 4),
        speed_ratio=ratio,
    )


def report(name: str, settings: argparse.Namespace, rounds: Sequence[Round], other: str, turns: str) -> None:
    """Prints the figures as a table, and writes them to a file if one is named; `turns`: what a round was of each."""
    figures = compared(name, settings, rounds, other)
    trained = " · ".join(filter(None, (settings.recipe, settings.net, settings.dataset)))
    sides = {f"ours under the Trainer, {settings.precision}": figures["ours"], other: figures["plain"]}
    publish(
        figures,
        settings.json,
        f"bench {name} · {trained} · batch {settings.batch_size}",
        ("", "images/s", "ms a step"),
        [(what, spread_text(side["images_per_second"]), spread_text(side["ms_per_step"], ".3f")) for what, side in sides.items()],
        f"ours is {spread_text(figures['speed_ratio'], '.3f')} × as fast · {figures['difference_ms_per_step']:+.3f} ms a step",
        f"medians (quartiles) of {len(rounds)} rounds of {turns}, in turn",
    )
