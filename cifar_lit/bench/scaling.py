"""`cifar-lit bench scaling`: one recipe and global batch on 1, 2, … devices."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.recipe import mean_text
from cifar_lit.bench.report import figures_of, publish, spread, spread_text
from cifar_lit.errors import UsageError
from cifar_lit.hardware import detect_machine
from cifar_lit.runs.compare import mean_interval

WHAT = (
    "The same recipe and global batch on each number of devices, every training in a fresh process, as `python scripts/train.py` "
    "runs it: seconds, images/s, speed-up over the first number, test accuracy. What is not listed here goes to the training."
)


def add_arguments(parser: Any) -> None:
    """The flags of this measurement."""
    parser.trains = True
    parser.add_argument("--devices", default="1,2", help="numbers of devices, with commas")
    parser.add_argument("--runs", type=int, default=1, help="trainings with each number of devices")
    parser.add_argument("--seed", type=int, default=0, help="of the first run, one more with every run")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports; raises a training's UsageError or Failure with the line that it ended with."""
    if settings.runs < 1:
        raise UsageError("a measurement takes at least --runs 1")
    settings.devices = _counts(settings.devices)
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in settings.devices}
    for number in range(settings.runs):
        for count in settings.devices:  # in turn, so that what changes on the machine with time meets all
            flags = ["--devices", str(count), "--seed", str(settings.seed + number)]
            metrics = train([*settings.flags, *flags]).metrics
            runs[count].append(metrics)
            seconds, accuracy = metrics["train_seconds"], metrics["test"]["accuracy"]
            print(f"{_devices(count)}, run {number + 1} of {settings.runs}: {seconds:.1f} s, {accuracy:.4f}", file=sys.stderr)
    rows, metrics = rows_of(runs), next(iter(runs.values()))[0]
    shared = {name: metrics[name] for name in ("recipe", "net", "dataset", "batch_size", "epochs", "precision")}
    own = {**vars(settings), "flags": without_places(settings.flags), **shared}
    headline = [(_devices(row["devices"]), row["train_seconds"], "s") for row in rows]
    accelerator, cores = metrics["accelerator"], detect_machine().threads
    note = f"the processes share this machine's {cores} cores, which one process uses already: no speed-up is due"
    publish(
        figures_of("scaling", own, *headline, accelerator=accelerator, rows=rows),
        settings.json,
        "bench scaling · {recipe} · {dataset} · global batch {batch_size} · {precision}".format(**shared),
        ("devices", "train s", "images/s", "speed-up", "test accuracy"),
        [
            (
                f"{row['devices']} × {accelerator}",
                spread_text(row["train_seconds"], ".2f"),
                spread_text(row["images_per_second"]),
                spread_text(row["speed_up"], ".2f"),
                mean_text(mean_interval(row["accuracies"])),
            )
            for row in rows
        ],
        f"medians (quartiles) of {settings.runs} runs of {shared['epochs']} epochs, accuracy as mean ± standard deviation",
        *([note] if accelerator == "cpu" and max(runs) > 1 else []),
    )


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError(f"--devices takes different numbers of devices with commas, such as 1,2, not {text!r}")
    return counts


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def rows_of(runs: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each number of devices from the metrics of its runs; the first is what others are compared with."""
    first = next(iter(runs.values()))
    return [
        {
            "devices": count,
            "train_seconds": spread(run["train_seconds"] for run in same),
            "images_per_second": spread(run["images_per_second"] for run in same),
            "speed_up": spread(one["train_seconds"] / run["train_seconds"] for one, run in zip(first, same, strict=True)),
            "accuracies": [run["test"]["accuracy"] for run in same],
        }
        for count, same in runs.items()
    ]
