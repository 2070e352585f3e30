"""`cifar-lit bench step`: what the Trainer adds to a recipe's training steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.plain import BareLoop
from cifar_lit.bench.report import environment, headline, publish, settings_of, spread, spread_text
from cifar_lit.bench.subprocess_loop import take
from cifar_lit.bench.training import LINEAR, Lap, Stopwatch, Subject, add_training_arguments, fit, read_clock, subject_from
from cifar_lit.errors import UsageError

WHAT = (
    "Our training images/s under the Trainer, with bar, TensorBoard and metrics on, against a bare PyTorch loop with the same "
    "net, weights, batches, precision, optimizer and schedule. Both take turns in one process, so that whatever else the "
    "machine does meets both. Without --recipe the net is a single layer, which shows the Trainer's own cost."
)
SECONDS, MAX_STEPS, TRIAL_STEPS = 90.0, 100, 8  # a measurement takes about so long, in rounds of at most so many steps

# Starts the other training, given ours before its first step; it yields after each turn with the images of that turn.
StartLoop = Callable[[pl.Trainer, Any], Iterator[int]]


class Round(NamedTuple):
    """One turn of each: optimizer steps and training images of either, seconds of ours and of the plain loop."""

    steps: int
    images: int
    ours: float
    plain: float


class Interleave(Stopwatch):
    """After every `steps` steps of the Trainer, runs as many of the plain loop; the first round of each warms up.

    start: makes the plain loop, which yields after every step. rounds: how many are counted before the fit is stopped.
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
        images = take(self._plain, lap.steps if lap else self._warmup)
        if lap:
            self.rounds.append(Round(lap.steps, images, lap.seconds, read_clock(self._device) - started))


class InterleaveEpochs(Callback):
    """After every epoch of the Trainer with its validation, and all that it does at its end, one of the plain loop.

    start: makes the plain loop, which yields after every epoch with its evaluation, with the number of training images.
    """

    def __init__(self, start: StartLoop) -> None:
        self._start = start
        self._plain: Iterator[int] = iter(())
        self._started, self._started_at = 0.0, 0
        self.rounds: list[Round] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the plain loop, off the clock."""
        self._plain = self._start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the epoch before, if there was one, and starts this."""
        if trainer.global_step > self._started_at:
            self.on_train_end(trainer, pl_module)
        self._started, self._started_at = read_clock(pl_module.device), trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends an epoch, in the end the last one, and has the plain loop make one."""
        paused = read_clock(pl_module.device)
        images = take(self._plain, 1)
        steps = trainer.global_step - self._started_at
        self.rounds.append(Round(steps, images, paused - self._started, read_clock(pl_module.device) - paused))


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe=None)
    text = f"of each in a round; if not given, what takes about {SECONDS:.0f} s in all, at most {MAX_STEPS}"
    parser.add_argument("--steps", type=int | None, default=None, help=text)
    parser.add_argument("--rounds", type=int, default=20, help="rounds, after one to warm up")


def run(settings: Namespace) -> None:
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
    turns = Interleave(lambda trainer, model: BareLoop(trainer, model, subject.data).steps(), settings.steps, settings.rounds)
    # no longer than that, so that schedules (of rates, of image sizes) run through whole while they are measured
    settings.precision = fit(subject, turns, max_epochs=-(-steps // subject.steps_per_epoch))
    report("step", settings, turns.rounds, "bare loop", f"{settings.steps} steps each")


def seconds_per_step(subject: Subject) -> float:
    """Of a few steps under the Trainer, which leave the subject as it is."""
    watch = Stopwatch(2, TRIAL_STEPS, 1)
    trial = subject._replace(model=deepcopy(subject.model), data=copy(subject.data))
    fit(trial, watch, max_epochs=-(-(2 + TRIAL_STEPS) // subject.steps_per_epoch))
    return watch.laps[0].seconds / watch.laps[0].steps


def compared(name: str, settings: Namespace, rounds: Sequence[Round], other: str) -> dict[str, Any]:
    """The figures: images/s and ms a step of both, and the ratio of ours over `other`, above 1 where ours is faster."""
    seconds = {"ours": [turn.ours for turn in rounds], "plain": [turn.plain for turn in rounds]}
    sides = {
        name: {
            "images_per_second": spread(turn.images / one for turn, one in zip(rounds, own, strict=True)),
            "ms_per_step": spread(1e3 * one / turn.steps for turn, one in zip(rounds, own, strict=True)),
        }
        for name, own in seconds.items()
    }
    ours, plain = (side["images_per_second"] for side in sides.values())
    ours_ms, plain_ms = (side["ms_per_step"]["median"] for side in sides.values())
    ratio = spread(turn.plain / turn.ours for turn in rounds)
    return {
        "bench": name,
        "settings": settings_of(settings),
        "environment": environment(),
        **headline(("ours", ours, "images/s"), (other, plain, "images/s"), (f"ours / {other}", ratio, "×")),
        "rounds": len(rounds),
        "ours": sides["ours"],
        "plain": {"what": other, **sides["plain"]},
        "difference_ms_per_step": round(ours_ms - plain_ms, 4),
        "speed_ratio": ratio,
    }


def report(name: str, settings: Namespace, rounds: Sequence[Round], other: str, turns: str) -> None:
    """Prints the figures as a table, and writes them to a file if one is named; `turns`: what a round was of each."""
    figures = compared(name, settings, rounds, other)
    trained = " · ".join(filter(None, (settings.recipe, settings.net, settings.dataset)))
    sides = {f"ours under the Trainer, {settings.precision}": figures["ours"], other: figures["plain"]}
    publish(
        figures,
        settings.json,
        f"bench {name} · {trained} · batch {settings.batch_size}",
        ("", "images/s", "ms a step"),
        [
            (label, spread_text(side["images_per_second"]), spread_text(side["ms_per_step"], ".3f"))
            for label, side in sides.items()
        ],
        f"ours is {spread_text(figures['speed_ratio'], '.3f')} × as fast · {figures['difference_ms_per_step']:+.3f} ms a step",
        f"medians (quartiles) of {len(rounds)} rounds of {turns}, in turn",
    )
