"""Cost of `model.margins` in a training step: python scripts/benchmarks/margins_step.py --recipe laptop90."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from lightning.pytorch.callbacks import Callback
from script import run_script
from timed_fit import add_training_arguments, fit, subject_from

from cifar_lit.bench.report import publish, spread
from cifar_lit.errors import UsageError

WHAT = (
    "Train with and without `model.margins` in alternating steps of one fit, and compare the processor time of "
    "neighbouring steps. The order within a pair alternates too."
)
WARMUP = 4  # pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    add_training_arguments(parser, recipe="laptop90")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of steps")


class Alternate(Callback):
    """Switch the loss hooks on and off, and keep the processor time of each step, in seconds."""

    def __init__(self, pairs: int) -> None:
        self.steps, self._pairs = list[tuple[bool, float]](), pairs

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Switch the hooks: off, on, on, off, and so on."""
        if trainer.global_step == 0:
            self._hooks = pl_module.loss_hooks
        self._on = trainer.global_step % 4 in (1, 2)
        pl_module.loss_hooks = self._hooks if self._on else []
        self._begun = time.process_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the time."""
        self.steps.append((self._on, time.process_time() - self._begun))
        trainer.should_stop = len(self.steps) >= 2 * (self._pairs + WARMUP)


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.pairs < 10:
        raise UsageError("--pairs must be at least 10")
    subject = subject_from(settings, [*settings.flags, "--model.margins=true"])
    steps = Alternate(settings.pairs)
    fit(subject, steps, max_epochs=100_000)
    pairs = [dict(pair) for pair in zip(steps.steps[::2], steps.steps[1::2], strict=False)][WARMUP:]
    ratios = [100 * (pair[True] / pair[False] - 1) for pair in pairs]
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))  # 95 % interval of a median, by order statistics
    low, high = ordered[max(0, math.floor(len(ratios) / 2 - half))], ordered[-1 - math.floor(len(ratios) / 2 - half)]
    rows = [
        ("a step without margins", spread(1e3 * pair[False] for pair in pairs), "ms"),
        ("a step with margins", spread(1e3 * pair[True] for pair in pairs), "ms"),
        ("additional time", spread(ratios), "%"),
    ]
    line = f"95 % interval of the median additional time: {low:.2f} … {high:.2f} %"
    interval = [round(low, 3), round(high, 3)]
    publish("margins_step", vars(settings), f"{settings.recipe}, processor time", rows, line, interval=interval)


if __name__ == "__main__":
    raise SystemExit(run_script())
