"""`cifar-lit bench scaling`: one recipe and global batch on 1, 2, … devices."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar_lit.bench.process import public, train
from cifar_lit.bench.report import environment, footer, headline, show, shown_spread, spread, write_figures
from cifar_lit.bench.words import PassingParser, check_passed_on
from cifar_lit.errors import UsageError
from cifar_lit.hardware import detect_machine

WHAT = (
    "The same recipe and global batch on each number of devices, every training in a fresh process, as `python scripts/train.py` "
    "runs it: seconds, images/s, speed-up over the first number, test accuracy. What is not listed here goes to the training."
)


def main(words: list[str]) -> None:
    """Runs the measurement; raises UsageError and Failure, a training's own with the line that it ended with."""
    parser = PassingParser(prog="cifar-lit bench scaling", description=WHAT)
    parser.add_argument("--devices", default="1,2", help="numbers of devices, with commas (1,2)")
    parser.add_argument("--runs", type=int, default=1, help="trainings with each number of devices (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run, one more with every run (0)")
    parser.add_argument("--json", help="write the figures to this file too")
    settings, passed_on = parser.parse_known_args(words)
    counts = _counts(settings.devices)
    check_passed_on(settings, passed_on)
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for run in range(settings.runs):
        for count in counts:  # in turn, so that what changes on the machine with time meets all
            metrics = train([*passed_on, "--devices", str(count), "--seed", str(settings.seed + run)]).metrics
            found[count].append(metrics)
            seconds, accuracy = metrics["train_seconds"], metrics["test"]["accuracy"]
            print(f"{_named(count)}, run {run + 1} of {settings.runs}: {seconds:.1f} s, {accuracy:.4f}", file=sys.stderr)
    figures = figures_of(found, {"flags": public(passed_on), "devices": counts, "runs": settings.runs, "seed": settings.seed})
    if settings.json:
        write_figures(Path(settings.json), figures)
    _print(figures)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(f"--devices takes different numbers of devices with commas, such as 1,2, not {text!r}")
    return counts


def figures_of(found: dict[int, list[dict[str, Any]]], settings: dict[str, Any]) -> dict[str, Any]:
    """The figures from the metrics of the runs with each number of devices; the first number is what others are compared with."""
    first = found[next(iter(found))]
    rows: list[dict[str, Any]] = []
    for count, runs in found.items():
        pairs = zip(first, runs, strict=True)
        rows.append(
            {
                "devices": count,
                "train_seconds": spread(run["train_seconds"] for run in runs),
                "images_per_second": spread(run["images_per_second"] for run in runs),
                "speed_up": spread(before["train_seconds"] / run["train_seconds"] for before, run in pairs),
                "accuracies": [run["test"]["accuracy"] for run in runs],
            }
        )
    one = first[0]
    return {
        "bench": "scaling",
        "settings": {
            **settings,
            **{name: one[name] for name in ("recipe", "net", "dataset", "batch_size", "epochs", "precision")},
        },
        "environment": environment(),
        **headline(*((_named(row["devices"]), row["train_seconds"], "s") for row in rows)),
        "accelerator": one["accelerator"],
        "rows": rows,
    }


def _named(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _print(figures: dict[str, Any]) -> None:
    settings, rows = figures["settings"], figures["rows"]
    notes = []
    if figures["accelerator"] == "cpu" and max(row["devices"] for row in rows) > 1:
        cores = detect_machine().threads
        notes.append(f"the processes share this machine's {cores} cores, which one process uses already: no speed-up is due")
    trained = f"{settings['recipe']} · {settings['dataset']} · global batch {settings['batch_size']} · {settings['precision']}"
    show(
        f"bench scaling · {trained}",
        ("devices", "train s", "images/s", "speed-up", "test accuracy"),
        [
            (
                f"{row['devices']} × {figures['accelerator']}",
                shown_spread(row["train_seconds"], ".2f"),
                shown_spread(row["images_per_second"]),
                shown_spread(row["speed_up"], ".2f"),
                accuracy_text(row["accuracies"]),
            )
            for row in rows
        ],
        f"medians (quartiles) of {settings['runs']} runs of {settings['epochs']} epochs, accuracy as mean ± standard deviation",
        *notes,
        footer(figures),
    )


def accuracy_text(values: Sequence[float]) -> str:
    """The mean in %, with the standard deviation where there is one."""
    mean = f"{statistics.mean(values):.2%}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean
