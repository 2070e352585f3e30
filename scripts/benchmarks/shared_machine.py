"""Training time beside another training for several OpenMP spin limits: python scripts/benchmarks/shared_machine.py."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from script import run_script

from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.report import publish, spread
from cifar_lit.errors import UsageError
from cifar_lit.hardware import SPIN_LIMITS, SPIN_SETTINGS

WHAT = (
    "Measure the seconds of a training (without start-up and test) that runs alone, and of two that run at once, with"
    " each of the given OpenMP settings, such as GOMP_SPINCOUNT=5000, OMP_WAIT_POLICY=PASSIVE, `default` for the "
    "defaults of the OpenMP library, or `ours`. The settings take turns. Other flags are passed to the training."
)
DEFAULT_OF_GNU = "GOMP_SPINCOUNT=300000"  # iterations of libgomp without OMP_WAIT_POLICY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--runs", type=int, default=3, help="rounds through all settings")
    parser.add_argument("--spin", nargs="+", default=["default", "ours"], metavar="NAME=VALUE", help="OpenMP settings")
    parser.add_argument("--together", default="1,2", help="numbers of concurrent trainings, in turn")


def run(settings: argparse.Namespace) -> None:
    """Measure and report; raise UsageError or Failure with the last line of a training that failed."""
    if settings.runs < 1:
        raise UsageError("--runs must be at least 1")
    counts = [int(count) for count in settings.together.split(",")]
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(settings.runs):
        for spin in settings.spin:
            for count in counts:
                label = f"{'alone' if count == 1 else f'{count} at once'}, {spin}"
                seconds[label] += train_together(settings.flags, spin, count)
    publish(
        "shared_machine",
        {**vars(settings), "flags": without_places(settings.flags)},
        " ".join(settings.flags),
        [(label, spread(values), "s") for label, values in seconds.items()],
        f"{settings.runs} rounds",
    )


def train_together(flags: list[str], spin: str, count: int) -> list[float]:
    """Return the training seconds of `count` trainings that start together under an OpenMP setting."""
    for name in SPIN_SETTINGS:
        os.environ.pop(name, None)
    if spin == "ours":
        os.environ.update(SPIN_LIMITS)
    else:
        name, _, value = (DEFAULT_OF_GNU if spin == "default" else spin).partition("=")
        os.environ[name] = value
    with ThreadPoolExecutor(count) as pool:
        finished = list(pool.map(train, [flags] * count))
    return [each.metrics["train_seconds"] for each in finished]


if __name__ == "__main__":
    raise SystemExit(run_script())
