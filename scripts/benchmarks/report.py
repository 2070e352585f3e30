"""Common report of measurements: spread of values, environment, table and JSON file."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from rich.table import Column, Table

from cifar_lit.base.files import write_text
from cifar_lit.base.hardware import detect_machine
from cifar_lit.base.text import counted
from cifar_lit.cli.console import for_tables
from cifar_lit.run.results import versions

FEW = 4  # values; with fewer, a spread is the range and a mean has no interval


class Spread(TypedDict):
    """Number, median and quartiles of values; minimum and maximum if there are fewer than FEW."""

    n: int
    median: float
    low: float
    high: float


Row = tuple[str, float | Spread, str]  # label, value, unit
NOT_FIGURES = ("json", "root", "names")  # settings left out of the JSON file


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of at least one value, with five significant digits."""
    listed = sorted(values)
    low, high = listed[0], listed[-1]
    if len(listed) >= FEW:
        low, _, high = statistics.quantiles(listed, n=4, method="inclusive")
    return {
        "n": len(listed),
        "median": _rounded(statistics.median(listed)),
        "low": _rounded(low),
        "high": _rounded(high),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def number_text(value: float) -> str:
    """Return a number with at least four significant digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def spread_text(value: float | Spread, unit: str = "") -> str:
    """Return a median with its spread, as in `4,335 images/s (4,301 … 4,370, n = 9)`, or a single number."""
    if not isinstance(value, dict):
        return f"{number_text(value)} {unit}".strip()
    median = f"{number_text(value['median'])} {unit}".strip()
    if value["n"] == 1:
        return f"{median} (n = 1)"
    return f"{median} ({number_text(value['low'])} … {number_text(value['high'])}, n = {value['n']})"


def machine_text(environment: Mapping[str, Any], accelerator: str | None = None) -> str:
    """Return the GPU, or the CPU with its threads if there is no GPU or `accelerator` is "cpu"."""
    if environment.get("gpu") and accelerator != "cpu":
        return str(environment["gpu"])
    cpu = environment["cpu"]
    if environment.get("bf16"):  # several times as fast as without
        cpu = f"{cpu} with bf16"
    return f"{cpu}, {counted(environment['threads'], 'thread')}"


def figures_of(bench: str, settings: Mapping[str, object], rows: Sequence[Row], **more: object) -> dict[str, Any]:
    """Return the contents of a measurement's JSON file: name, settings, environment, values and units by label."""
    return {
        "bench": bench,
        "settings": {name: value for name, value in settings.items() if name not in NOT_FIGURES},
        "environment": environment(),
        "headline": {label: value for label, value, _ in rows},
        "unit": {label: unit for label, _, unit in rows},
        **more,
    }


def publish(bench: str, settings: Mapping[str, Any], rows: Sequence[Row], **more: object) -> None:
    """Print rows as a table with the settings, and write figures to the --json file."""
    figures = figures_of(bench, settings, rows, **more)
    if settings["json"]:
        write_figures(Path(settings["json"]), figures)
    table = Table("", Column("median (quartiles; range if n < 4)", justify="right"))
    for label, value, unit in rows:
        table.add_row(label, spread_text(value, unit))
    console = for_tables()
    console.print(table)
    console.print(f"{bench} · {figures['settings']} · {machine_text(figures['environment'])}")


def write_figures(path: Path, figures: Mapping[str, object]) -> None:
    """Write the figures as JSON, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


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
