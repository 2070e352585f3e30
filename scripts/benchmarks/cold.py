"""Seconds from the start of the process to the tested net: python scripts/benchmarks/cold.py --recipe laptop."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from script import run_script

from cifar_lit.bench.commands import PassingParser
from cifar_lit.bench.process import Finished, as_error, environment, train, without_places
from cifar_lit.bench.report import environment as machine
from cifar_lit.bench.report import headline, publish, spread, spread_text
from cifar_lit.errors import UsageError

WHAT = (
    "Seconds from the start of the process to its end with a tested net, in a fresh process each time: imports alone, everything "
    "up to the first training step (imports, images, net, Trainer), training with validation, and the test with the files "
    "written. What is not listed here goes to the training. The files may be in the system's cache."
)
IMPORTS = "from cifar_lit.cli.quiet import quieten; quieten(); import cifar_lit.cli.fit"


def main(argv: list[str]) -> None:
    """Runs the measurement; raises UsageError and Failure, a training's own with the line that it ended with."""
    parser = PassingParser(prog="cold.py", description=WHAT)
    parser.add_argument("--runs", type=int, default=3, help="trainings, each in a fresh process (3)")
    parser.add_argument("--json", help="write the figures to this file too")
    settings, rest = parser.parse_with_rest(argv)
    imports, runs = [], []
    for _ in range(settings.runs):
        imports.append(import_seconds())
        runs.append(train(rest))
    seconds = seconds_of(runs, imports)
    metrics = runs[0].metrics
    names = ("recipe", "net", "dataset", "batch_size", "epochs", "precision", "accelerator")
    figures: dict[str, Any] = {
        "bench": "cold",
        "settings": {"flags": without_places(rest), "runs": len(runs), **{name: metrics[name] for name in names}},
        "environment": machine(),
        **headline(*((name, value, "s") for name, value in seconds.items())),
        "seconds": seconds,
        "accuracies": [run.metrics["test"]["accuracy"] for run in runs],
    }
    publish(
        figures,
        settings.json,
        f"cold · {metrics['recipe']} · {metrics['dataset']} · {metrics['epochs']} epochs",
        ("", "seconds"),
        [(name, spread_text(value, ".2f")) for name, value in seconds.items()],
        f"medians (quartiles) of {settings.runs} runs; the imports are part of the time to the first step",
    )


def import_seconds() -> float:
    """Seconds of a process that only imports what a training needs."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise as_error(1, done.stderr, "importing the command line")
    return time.perf_counter() - started


def seconds_of(runs: Sequence[Finished], imports: Sequence[float]) -> dict[str, dict[str, float]]:
    """The seconds of the runs' parts, which add up to the whole, by name."""
    parts = [_parts(run) for run in runs]
    return {"imports alone": spread(imports), **{name: spread(one[name] for one in parts) for name in parts[0]}}


def _parts(run: Finished) -> dict[str, float]:
    card = next((seconds for seconds, text in run.lines if text.startswith("data ")), None)
    if card is None:
        raise UsageError("the training printed no start card, so that its first step cannot be timed")
    training = run.metrics["train_seconds"]
    return {"to the first step": card, "training": training, "test and files": run.seconds - card - training, "all": run.seconds}


if __name__ == "__main__":
    raise SystemExit(run_script(main))
