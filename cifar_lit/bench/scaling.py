"""`cifar-lit bench scaling`: one recipe and global batch on 1, 2, … devices."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from itertools import product
from typing import Any

from cifar_lit.bench.process import train, without_places
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.errors import UsageError
from cifar_lit.hardware import detect_machine
from cifar_lit.text import note
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "The same recipe and global batch on each number of devices, every training in a fresh process, as `python scripts/train.py` "
    "runs it: seconds, images/s, speed-up over the first number, test accuracy. What is not listed here goes to the training."
)
RECIPE = "quickstart"  # if none is named
EPOCH = re.compile(r"epoch +(\d+)/(\d+) ")  # the line that a training prints after each


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
    if not {"--recipe", "--config"} & {flag.partition("=")[0] for flag in settings.flags}:
        settings.flags = ["--recipe", RECIPE, *settings.flags]
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    progress = Progress(len(counts) * settings.runs, "training")
    note(f"{progress.total} trainings, one after the other: how long they take is said after the first's first epoch")
    with suppress(Interrupted):
        for number, count in product(range(settings.runs), counts):  # in turn: what changes on the machine meets all
            done = sum(map(len, runs.values()))

            def on_line(line: str, done: int = done) -> None:
                if epoch := EPOCH.match(line):
                    progress.advance(done + int(epoch[1]) / int(epoch[2]), line.split(" · ")[0])

            seed = settings.seed + number
            metrics = train([*settings.flags, "--devices", str(count), "--seed", str(seed)], on_line).metrics
            runs[count].append(metrics)
            seconds, accuracy = metrics["train_seconds"], metrics["test"]["accuracy"]
            note(f"{count} devices, run {number + 1} of {settings.runs}: {seconds:.1f} s, {accuracy:.4f}")
    runs = {count: same for count, same in runs.items() if same}
    if not runs:
        return
    metrics = runs[counts[0]][0]
    shared = {name: metrics[name] for name in ("recipe", "net", "dataset", "batch_size", "epochs", "precision", "accelerator")}
    cores = detect_machine().threads
    shared_cores = f"the processes share this machine's {cores} cores, which one process uses already: no speed-up is due"
    publish(
        "scaling",
        {**vars(settings), "devices": counts, "flags": without_places(settings.flags), **shared},
        "{recipe} · {dataset} · global batch {batch_size} · {precision}".format(**shared),
        rows_of(runs),
        f"of {len(runs[counts[0]])} runs of {shared['epochs']} epochs",
        *([shared_cores] if shared["accelerator"] == "cpu" and max(counts) > 1 else []),
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
            ratios = (one["train_seconds"] / run["train_seconds"] for one, run in zip(first, same, strict=False))
            rows.append((f"{name}, speed-up", spread(ratios), "×"))
        rows.append((f"{name}, test accuracy", spread(100 * run["test"]["accuracy"] for run in same), "%"))
    return rows
