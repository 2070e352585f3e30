"""The file of `train --seeds --json FILE`: accuracy and time of each training, and the machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from cifar_lit.base.files import write_text
from cifar_lit.base.hardware import detect_machine
from cifar_lit.base.stats import SHARE, mean_interval
from cifar_lit.cli.flags import Command, recipe_path
from cifar_lit.run.folder import read_metrics
from cifar_lit.run.results import versions

PLACES = re.compile(r"--(data-dir|data\.root|data\.cache_dir)=")  # paths, left out of the recorded flags
FIGURES = ("seed", "dataset", "accelerator", "precision", "parameters", "images_per_second", "test_seconds")
SCORES = ("accuracy", "loss", "balanced_accuracy", "macro_f1")


def write_seeds_file(command: Command, runs: Sequence[Path], warm: Collection[str]) -> None:
    """Write the --json file with these runs.

    Args:
        command: the command, with `json`.
        runs: folders of finished runs.
        warm: names of the runs whose time counts. The first training of a process loads code.
    """
    name = "custom"
    if command.recipe:
        name = recipe_path(command.recipe).stem
    entries = []
    for run in runs:
        metrics = read_metrics(run)
        test = metrics["test"]
        entry = {key: metrics[key] for key in FIGURES} | {key: test[key] for key in SCORES}
        entry |= {"views": test.get("tta"), "seconds": metrics["train_seconds"], "first": run.name not in warm}
        entries.append(entry)
    accuracy = mean_interval([entry["accuracy"] for entry in entries], SHARE)
    content = {
        "bench": "recipe",
        "settings": {"flags": [word for word in command.flags if not PLACES.match(word)]},
        "environment": environment(),
        "recipes": {name: {"accuracy": accuracy, "runs": entries}},
    }
    write_text(Path(str(command.json)), json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def environment() -> dict[str, Any]:
    """Return date, cpu, bf16 (hardware support), threads (of torch), gpu (None without) and versions."""
    machine = detect_machine()
    gpus = [name for name, _ in machine.gpus]
    gpu = None
    if gpus:
        gpu = gpus[0] if len(gpus) == 1 else f"{len(gpus)} × {gpus[0]}"
    elif machine.mps:
        gpu = "Apple GPU"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": exact_cpu(machine.cpu),
        "bf16": machine.bf16,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "versions": versions(),
    }


def exact_cpu(name: str) -> str:
    """Return the name of the CPU, with family and model if it has no number: a virtual machine may hide the product."""
    info = Path("/proc/cpuinfo")
    if re.search(r"\d", name.partition("@")[0]) or not info.is_file():
        return name
    numbers = re.findall(r"^(?:cpu )?(family|model)\s*: (\d+)$", info.read_text(encoding="utf-8"), re.MULTILINE)[:2]
    return f"{name} ({', '.join(map(' '.join, numbers))})"
