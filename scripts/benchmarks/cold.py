"""`cifar-lit bench cold`: from the start of the process to the tested net, and what that is made of."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar_lit.bench.process import Finished, environment, public, train
from cifar_lit.bench.report import environment as machine
from cifar_lit.bench.report import footer, headline, show, shown_spread, spread, write_figures
from cifar_lit.bench.words import PassingParser, check_passed_on
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Seconds from the start of the process to its end with a tested net, in a fresh process each time: imports alone, everything "
    "up to the first training step (imports, images, net, Trainer), training with validation, and the test with the files "
    "written. What is not listed here goes to the training. The files may be in the system's cache."
)


def main(words: list[str]) -> None:
    """Runs the measurement; raises UsageError and Failure, a training's own with the line that it ended with."""
    parser = PassingParser(prog="cifar-lit bench cold", description=WHAT)
    parser.add_argument("--runs", type=int, default=3, help="trainings, each in a fresh process (3)")
    parser.add_argument("--json", help="write the figures to this file too")
    settings, passed_on = parser.parse_known_args(words)
    check_passed_on(settings, passed_on)
    imports, runs = [], []
    for _ in range(settings.runs):
        imports.append(import_seconds())
        runs.append(train(passed_on))
    figures = figures_of(runs, imports, passed_on)
    if settings.json:
        write_figures(Path(settings.json), figures)
    one = figures["settings"]
    show(
        f"bench cold · {one['recipe']} · {one['dataset']} · {one['epochs']} epochs",
        ("", "seconds"),
        [(name, shown_spread(found, ".2f")) for name, found in figures["seconds"].items()],
        f"medians (quartiles) of {settings.runs} runs; the imports are part of the time to the first step",
        footer(figures),
    )


def import_seconds() -> float:
    """Seconds of a process that only imports what a training needs."""
    started = time.perf_counter()
    line = "from cifar_lit.cli.quiet import quieten; quieten(); import cifar_lit.cli.app"
    done = subprocess.run([sys.executable, "-c", line], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"the command line cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    return time.perf_counter() - started


def parts(run: Finished) -> dict[str, float]:
    """The seconds of a run's parts, which add up to the whole."""
    card = next((seconds for seconds, text in run.lines if text.startswith("data ")), None)
    if card is None:
        raise UsageError("the training printed no start card, so that its first step cannot be timed")
    training = run.metrics["train_seconds"]
    return {"to the first step": card, "training": training, "test and files": run.seconds - card - training, "all": run.seconds}


def figures_of(runs: Sequence[Finished], imports: Sequence[float], passed_on: Sequence[str]) -> dict[str, Any]:
    """The figures of several runs of the same training."""
    found = [parts(run) for run in runs]
    seconds = {"imports alone": spread(imports), **{name: spread(one[name] for one in found) for name in found[0]}}
    metrics = runs[0].metrics
    names = ("recipe", "net", "dataset", "batch_size", "epochs", "precision", "accelerator")
    return {
        "bench": "cold",
        "settings": {"flags": public(passed_on), "runs": len(runs), **{name: metrics[name] for name in names}},
        "environment": machine(),
        **headline(*((name, value, "s") for name, value in seconds.items())),
        "seconds": seconds,
        "accuracies": [run.metrics["test"]["accuracy"] for run in runs],
    }
