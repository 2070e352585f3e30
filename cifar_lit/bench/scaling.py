"""`cifar-lit bench scaling`: one recipe and global batch on 1, 2, … devices."""

from __future__ import annotations

import argparse
from typing import Any

from cifar_lit import text
from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.errors import UsageError
from cifar_lit.hardware import detect_machine

WHAT = (
    "The same recipe and global batch on each number of devices, every training in a fresh process, as `python scripts/train.py` "
    "runs it: seconds, images/s, speed-up over the first number, test accuracy. What is not listed here goes to the training."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--devices", default="1,2", help="numbers of devices, with commas")
    parser.add_argument("--runs", type=int, default=1, help="trainings with each number of devices")
    parser.add_argument("--seed", type=int, default=0, help="of the first run, one more with every run")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports; raises a training's UsageError or Failure with the line that it ended with."""
    counts = [int(text) if text.isdecimal() else 0 for text in settings.devices.split(",")]
    if settings.runs < 1 or min(counts) < 1 or len(set(counts)) < len(counts):
        raise UsageError("a measurement takes at least --runs 1, and as --devices different numbers with commas, such as 1,2")
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for number in range(settings.runs):
        for count in counts:  # in turn, so that what changes on the machine with time meets all
            metrics = train([*settings.flags, "--devices", str(count), "--seed", str(settings.seed + number)]).metrics
            runs[count].append(metrics)
            seconds, accuracy = metrics["train_seconds"], metrics["test"]["accuracy"]
            text.note(f"{count} devices, run {number + 1} of {settings.runs}: {seconds:.1f} s, {accuracy:.4f}")
    shared = {name: metrics[name] for name in ("recipe", "net", "dataset", "batch_size", "epochs", "precision", "accelerator")}
    cores = detect_machine().threads
    note = f"the processes share this machine's {cores} cores, which one process uses already: no speed-up is due"
    publish(
        "scaling",
        {**vars(settings), "devices": counts, "flags": without_places(settings.flags), **shared},
        "{recipe} · {dataset} · global batch {batch_size} · {precision}".format(**shared),
        rows_of(runs),
        f"of {settings.runs} runs of {shared['epochs']} epochs",
        *([note] if shared["accelerator"] == "cpu" and max(counts) > 1 else []),
        accelerator=shared["accelerator"],
    )


def rows_of(runs: dict[int, list[dict[str, Any]]]) -> list[Row]:
    """Rows for each number of devices, from the metrics of its runs; the first is what others are compared with, seed by seed."""
    rows: list[Row] = []
    first = next(iter(runs.values()))
    for count, same in runs.items():
        name = f"{count} device{'s' * (count > 1)}"
        rows.append((name, spread(run["train_seconds"] for run in same), "s"))
        rows.append((f"{name}, speed", spread(run["images_per_second"] for run in same), "images/s"))
        if same is not first:
            ratios = (one["train_seconds"] / run["train_seconds"] for one, run in zip(first, same, strict=True))
            rows.append((f"{name}, speed-up", spread(ratios), "×"))
        rows.append((f"{name}, test accuracy", spread(100 * run["test"]["accuracy"] for run in same), "%"))
    return rows
