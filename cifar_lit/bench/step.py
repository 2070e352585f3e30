"""`cifar-lit bench step`: what the Trainer adds to a recipe's training steps."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.comparison import comparison, report
from cifar_lit.bench.interleave import Interleave
from cifar_lit.bench.plain import BareLoop
from cifar_lit.bench.training import LINEAR, add_training_arguments, epochs_for, fit, subject
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Our training images/s under the Trainer, with bar, TensorBoard and metrics on, against a bare PyTorch loop with the same "
    "net, weights, batches, precision, optimizer and schedule. Both take turns in one process, so that whatever else the "
    "machine does meets both. Without --recipe the net is a single layer, which shows the Trainer's own cost."
)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe=None)
    parser.add_argument("--steps", type=int, default=100, help="steps of each in a round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, after one to warm up")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 2 or settings.steps < 1:
        raise UsageError("a measurement takes at least --rounds 2 of --steps 1")
    if not settings.recipe and not settings.net:
        settings.net = LINEAR
    what = subject(settings)
    turns = Interleave(lambda trainer, model: BareLoop(trainer, model, what.data).steps(), settings.steps, settings.rounds)
    # no longer than that, so that schedules (of rates, of image sizes) run through whole while they are measured
    settings.precision = fit(what, turns, max_epochs=epochs_for(what, settings.steps, settings.rounds))
    if len(turns.rounds) < 2:
        raise Failure(f"only {len(turns.rounds)} rounds were counted before the training was over: raise --rounds")
    figures = comparison("step", settings, turns.rounds, "bare loop")
    report(figures, settings.json, f"at least {settings.steps} steps each")
