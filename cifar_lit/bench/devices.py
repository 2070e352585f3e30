"""`cifar-lit bench devices`: one recipe on each device of this machine, or on several devices together."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from cifar_lit.bench.process import as_error, started, without_places
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine, detect_machine
from cifar_lit.runs.run_folder import read_metrics
from cifar_lit.text import counted, note
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Train one recipe on the CPU and on each GPU, or with --devices 1,2 on one and two devices with the same global "
    "batch size. Every training runs in a new process. The table has seconds, images/s, speed-up over the first row, "
    "test accuracy. Other flags are passed to the trainings, such as --recipe (default: quickstart) or --epochs 1."
)
Metrics = dict[str, Any]  # metrics.json of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--devices", metavar="1,2", help="compare these numbers of devices, not the CPU and each GPU")
    parser.add_argument("--runs", type=int, default=1, help="trainings per row")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; each further run adds one")


def each_device(machine: Machine) -> dict[str, list[str]]:
    """Return the flags that select the CPU and every GPU alone, by the device's name."""
    flags = {"cpu": ["--accelerator", "cpu", "--devices", "1"]}
    for number, (name, _) in enumerate(machine.gpus):
        flags[f"gpu {number}, {name}"] = ["--accelerator", "gpu", "--devices", f"[{number}]"]
    if machine.mps:
        flags["mps"] = ["--accelerator", "mps", "--devices", "1"]
    return flags


def each_count(text: str) -> dict[str, list[str]]:
    """Return the flags that select each number of devices in `text`, such as "1,2"; raise UsageError if invalid."""
    words = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d*", word) for word in words) or len(set(words)) < len(words):
        raise UsageError(f"--devices {text}: give different numbers of devices, such as --devices 1,2")
    return {counted(int(word), "device"): ["--devices", word] for word in words}


def run(settings: argparse.Namespace) -> None:
    """Measure and report, also if interrupted; raise a training's UsageError or Failure with its last line."""
    names = {flag.partition("=")[0] for flag in settings.flags}
    if settings.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {settings.runs}")
    if "--logs" in names:
        raise UsageError("run folders are deleted after the measurement: leave --logs out")
    if not settings.devices and names & {"--accelerator", "--trainer.accelerator", "--trainer.devices"}:
        raise UsageError("without --devices 1,2 the CPU and each GPU are measured: leave --accelerator out")
    if not names & {"--recipe", "--config"}:
        settings.flags = ["--recipe", "quickstart", *settings.flags]
    machine = detect_machine()
    setups = each_device(machine)
    if settings.devices:
        setups = each_count(settings.devices)
    runs: dict[str, list[Metrics]] = {setup: [] for setup in setups}
    note(f"{len(setups) * settings.runs} trainings, one after the other")
    catch_signals()
    try:
        # Alternate between the setups, so that other load on the machine affects all of them.
        for number, setup in product(range(settings.runs), setups):
            metrics = train([*settings.flags, *setups[setup], "--seed", str(settings.seed + number)])
            runs[setup].append(metrics)
            seconds, accuracy = metrics["train_seconds"], metrics["test"]["accuracy"]
            note(f"{setup}, run {number + 1} of {settings.runs}: {seconds:.1f} s, {accuracy:.4f}")
    except Interrupted:
        report(settings, machine, runs)
        raise
    report(settings, machine, runs)


def train(words: Sequence[str]) -> Metrics:
    """Train in a process and a temporary folder; return its metrics.json. Raise the error of the training."""
    with TemporaryDirectory() as logs, TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        command = [sys.executable, "-m", "cifar_lit", "train", *words, "--logs", logs]
        with started(command, stdout=subprocess.DEVNULL, stderr=errors) as process:
            process.wait()
        if process.returncode:
            errors.seek(0)
            raise as_error(process.returncode, errors.read())
        runs = [path.parent for path in Path(logs).glob("*/metrics.json")]
        if len(runs) != 1:
            raise Failure(f"the training left {len(runs)} results, not 1: leave out flags that shorten or repeat it")
        return read_metrics(runs[0])


def report(settings: argparse.Namespace, machine: Machine, setups: dict[str, list[Metrics]]) -> None:
    """Publish the finished runs of each setup, if there are any."""
    runs = {setup: trained for setup, trained in setups.items() if trained}
    if not runs:
        return
    each = list(runs.values())
    first, last = each[0][0], each[-1][0]
    shared = {name: first[name] for name in ("recipe", "net", "dataset", "batch_size", "epochs")}
    precisions = ", ".join(f"{setup} in {trained[0]['precision']}" for setup, trained in runs.items())
    lines = [f"{counted(len(each[0]), 'run')} of {counted(first['epochs'], 'epoch')} each: {precisions}"]
    if last["accelerator"] == "cpu" and last["devices"] > 1:
        lines.append(
            f"All processes share the {machine.threads} cores that a single process already uses: no speed-up."
        )
    elif len(setups) == 1:
        lines.append("This machine has no GPU.")
    publish(
        "devices",
        {**vars(settings), "devices": list(runs), "flags": without_places(settings.flags), **shared},
        "{recipe} · {dataset} · global batch {batch_size}".format(**shared),
        rows_of(runs),
        *lines,
        accelerator=last["accelerator"],
    )


def rows_of(runs: dict[str, list[Metrics]]) -> list[Row]:
    """Return the rows of each setup. Speed-ups compare runs of the same seed with the first setup."""
    rows: list[Row] = []
    baseline = next(iter(runs.values()))
    for setup, trained in runs.items():
        rows.append((setup, spread(run["train_seconds"] for run in trained), "s"))
        rows.append((f"{setup}, speed", spread(run["images_per_second"] or 0.0 for run in trained), "images/s"))
        if trained is not baseline:
            pairs = zip(baseline, trained, strict=False)
            ratios = (reference["train_seconds"] / run["train_seconds"] for reference, run in pairs)
            rows.append((f"{setup}, speed-up", spread(ratios), "×"))
        rows.append((f"{setup}, test accuracy", spread(100 * run["test"]["accuracy"] for run in trained), "%"))
    return rows
