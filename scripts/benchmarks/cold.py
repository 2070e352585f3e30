"""Time from the start of the process to the tested net: python scripts/benchmarks/cold.py --recipe laptop."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from script import run_script

from cifar_lit.bench.process import FinishedTraining, as_error, child_environment, train, without_places
from cifar_lit.bench.report import Spread, publish, spread
from cifar_lit.errors import UsageError

WHAT = (
    "Measure seconds from the start of a fresh process to its end with a tested net: imports alone, everything up to "
    "the first training step (imports, images, net, Trainer), training with validation, and test with written files. "
    "Other flags are passed to the training. Files may be in the page cache."
)
IMPORTS = "from cifar_lit.cli.quiet import quieten; quieten(); import cifar_lit.cli.fit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--runs", type=int, default=3, help="trainings, each in a fresh process")


def run(settings: argparse.Namespace) -> None:
    """Measure and report; raise UsageError or Failure with the last line of a training that failed."""
    if settings.runs < 1:
        raise UsageError("--runs must be at least 1")
    imports, runs = [], []
    for _ in range(settings.runs):
        imports.append(import_seconds())
        runs.append(train(settings.flags))
    metrics = runs[0].metrics
    names = ("recipe", "net", "dataset", "batch_size", "epochs", "precision", "accelerator")
    own = {**vars(settings), "flags": without_places(settings.flags), **{name: metrics[name] for name in names}}
    publish(
        "cold",
        own,
        f"{metrics['recipe']} · {metrics['dataset']} · {metrics['epochs']} epochs",
        [(name, value, "s") for name, value in seconds_of(runs, imports).items()],
        f"of {settings.runs} runs; the imports are part of the time to the first step",
        accuracies=[run.metrics["test"]["accuracy"] for run in runs],
    )


def import_seconds() -> float:
    """Return the seconds of a process that only imports the modules of a training."""
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        raise as_error(1, done.stderr, "importing the command line")
    return time.perf_counter() - before


def seconds_of(runs: Sequence[FinishedTraining], imports: Sequence[float]) -> dict[str, Spread]:
    """Return the seconds of each phase by name. The phases add up to the whole."""
    parts = [_parts(run) for run in runs]
    return {"imports alone": spread(imports), **{name: spread(one[name] for one in parts) for name in parts[0]}}


def _parts(run: FinishedTraining) -> dict[str, float]:
    card = next((seconds for seconds, text in run.lines if text.startswith("data ")), None)
    if card is None:
        raise UsageError("the training printed no start card, so that its first step cannot be timed")
    training = run.metrics["train_seconds"]
    return {
        "to the first step": card,
        "training": training,
        "test and files": run.seconds - card - training,
        "all": run.seconds,
    }


if __name__ == "__main__":
    raise SystemExit(run_script())
