"""`cifar-lit bench scaling`: one recipe and global batch on 1, 2, … devices."""

from __future__ import annotations

import statistics
import sys
from typing import Any

from cifar_lit.bench.commands import PassingParser
from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.report import environment, headline, publish, spread, spread_text
from cifar_lit.errors import UsageError
from cifar_lit.hardware import detect_machine

WHAT = (
    "The same recipe and global batch on each number of devices, every training in a fresh process, as `python scripts/train.py` "
    "runs it: seconds, images/s, speed-up over the first number, test accuracy. What is not listed here goes to the training."
)


def main(argv: list[str]) -> None:
    """Runs the measurement; raises UsageError and Failure, a training's own with the line that it ended with."""
    parser = PassingParser(prog="cifar-lit bench scaling", description=WHAT)
    parser.add_argument("--devices", default="1,2", help="numbers of devices, with commas (1,2)")
    parser.add_argument("--runs", type=int, default=1, help="trainings with each number of devices (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run, one more with every run (0)")
    parser.add_argument("--json", help="write the figures to this file too")
    settings, rest = parser.parse_with_rest(argv)
    counts = _counts(settings.devices)
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for run in range(settings.runs):
        for count in counts:  # in turn, so that what changes on the machine with time meets all
            metrics = train([*rest, "--devices", str(count), "--seed", str(settings.seed + run)]).metrics
            runs[count].append(metrics)
            seconds, accuracy = metrics["train_seconds"], metrics["test"]["accuracy"]
            print(f"{_devices(count)}, run {run + 1} of {settings.runs}: {seconds:.1f} s, {accuracy:.4f}", file=sys.stderr)
    own = {"flags": without_places(rest), "devices": counts, "runs": settings.runs, "seed": settings.seed}
    _report(figures_of(runs, own), settings.json)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(f"--devices takes different numbers of devices with commas, such as 1,2, not {text!r}")
    return counts


def figures_of(runs: dict[int, list[dict[str, Any]]], settings: dict[str, Any]) -> dict[str, Any]:
    """The figures from the metrics of the runs with each number of devices; the first is what others are compared with."""
    first = next(iter(runs.values()))
    rows: list[dict[str, Any]] = [
        {
            "devices": count,
            "train_seconds": spread(run["train_seconds"] for run in same),
            "images_per_second": spread(run["images_per_second"] for run in same),
            "speed_up": spread(one["train_seconds"] / run["train_seconds"] for one, run in zip(first, same, strict=True)),
            "accuracies": [run["test"]["accuracy"] for run in same],
        }
        for count, same in runs.items()
    ]
    shared = ("recipe", "net", "dataset", "batch_size", "epochs", "precision")
    return {
        "bench": "scaling",
        "settings": {**settings, **{name: first[0][name] for name in shared}},
        "environment": environment(),
        **headline(*((_devices(row["devices"]), row["train_seconds"], "s") for row in rows)),
        "accelerator": first[0]["accelerator"],
        "rows": rows,
    }


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _report(figures: dict[str, Any], file: str | None) -> None:
    settings, rows, cores = figures["settings"], figures["rows"], detect_machine().threads
    on_cpu = figures["accelerator"] == "cpu" and max(row["devices"] for row in rows) > 1
    note = f"the processes share this machine's {cores} cores, which one process uses already: no speed-up is due"
    trained = f"{settings['recipe']} · {settings['dataset']} · global batch {settings['batch_size']} · {settings['precision']}"
    publish(
        figures,
        file,
        f"bench scaling · {trained}",
        ("devices", "train s", "images/s", "speed-up", "test accuracy"),
        [
            (
                f"{row['devices']} × {figures['accelerator']}",
                spread_text(row["train_seconds"], ".2f"),
                spread_text(row["images_per_second"]),
                spread_text(row["speed_up"], ".2f"),
                f"{statistics.mean(row['accuracies']):.2%}"
                + (f" ± {100 * statistics.stdev(row['accuracies']):.2f}" if len(row["accuracies"]) > 1 else ""),
            )
            for row in rows
        ],
        f"medians (quartiles) of {settings['runs']} runs of {settings['epochs']} epochs, accuracy as mean ± standard deviation",
        *([note] if on_cpu else []),
    )
