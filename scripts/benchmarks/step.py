"""Overhead of the Trainer in a recipe's training steps: python scripts/benchmarks/step.py --recipe cpu91."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from report import publish, spread
from timed_fit import timed

WHAT = (
    "Compare training images/s under the Trainer, with TensorBoard, metrics and checkpoints on, with a bare PyTorch "
    "loop that has the same net, weights, batches, precision, optimizer and schedule. Both take turns in one process. "
    "On a GPU, both compile their net if the recipe does."
)


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT, epilog="All other flags are those of `cifar-lit fit`.")
    parser.add_argument("--steps", type=int, default=10, help="steps of each loop in a round")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds")
    parser.add_argument("--warmup", type=int, default=10, help="warm-up steps, after the whitening schedule")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    settings, words = parser.parse_known_args(argv)
    watch = timed(words, "loops.Race", settings.steps, settings.rounds, settings.warmup)
    rounds = watch.rounds
    rows = [
        ("ours", spread(turn.images / turn.ours for turn in rounds), "images/s"),
        ("bare loop", spread(turn.images / turn.other for turn in rounds), "images/s"),
        ("ours, a step", spread(1e3 * turn.ours / turn.steps for turn in rounds), "ms"),
        ("bare loop, a step", spread(1e3 * turn.other / turn.steps for turn in rounds), "ms"),
        ("ours / bare loop", spread(turn.other / turn.ours for turn in rounds), "×"),
    ]
    publish("step", {**vars(settings), **watch.description, "flags": words}, rows)


if __name__ == "__main__":
    run()
