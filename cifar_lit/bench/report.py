"""What every measurement says in the same way: how its values spread, where it was made, a table, and a JSON file of it all."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.errors import Failure
from cifar_lit.files import write_text
from cifar_lit.hardware import detect_machine
from cifar_lit.runs.results import versions
from cifar_lit.text import counted

FEW = 4  # under so many values a spread is their range, and a mean has no interval


class Spread(TypedDict):
    """What several values come to: how many, their median, and their quartiles, or of fewer than four their least and largest."""

    n: int
    median: float
    low: float
    high: float


Row = tuple[str, float | Spread, str]  # what was measured, its value, the unit
NOT_FIGURES = (
    "json",
    "plot",
    "root",
    "threads",
    "names",
    "line",
)  # settings that say where files lie, or are told elsewhere


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value. Digits that no measurement supports are left out."""
    listed = sorted(values)
    quartiles = statistics.quantiles(listed, n=4, method="inclusive") if len(listed) >= FEW else None
    low, median, high = quartiles or (listed[0], statistics.median(listed), listed[-1])
    return {
        "n": len(listed),
        "median": float(f"{median:.5g}"),
        "low": float(f"{low:.5g}"),
        "high": float(f"{high:.5g}"),
    }


def number_text(value: float) -> str:
    """Four digits, and none of them lost before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread_text(value: float | Spread, unit: str = "") -> str:
    """A median with its spread, as in `4,335 images/s (4,301 … 4,370, n = 9)`; a number that is none of several by itself."""
    if not isinstance(value, dict):
        return f"{number_text(value)} {unit}".strip()
    around = f"{number_text(value['low'])} … {number_text(value['high'])}, " if value["n"] > 1 else ""
    return f"{number_text(value['median'])} {unit}".strip() + f" ({around}n = {value['n']})"


def environment() -> dict[str, Any]:
    """Where and when: date, cpu, bf16 (if in its hardware), threads (of torch), gpu (None if none), versions of what matters."""
    machine = detect_machine()
    names = sorted({name for name, _ in machine.gpus})
    gpu = ", ".join(names) if names else "Apple GPU" if machine.mps else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": machine.cpu,
        "bf16": machine.bf16,
        "threads": torch.get_num_threads(),
        "gpu": f"{len(machine.gpus)} × {gpu}" if len(machine.gpus) > 1 else gpu,
        "versions": versions(),
    }


def machine_text(environment: Mapping[str, Any], accelerator: str | None = None) -> str:
    """The GPU where there is one, unless `accelerator` is the CPU; else the CPU with torch's threads."""
    if environment.get("gpu") and accelerator != "cpu":
        return str(environment["gpu"])
    threads = environment["threads"]
    bf16 = " with bf16" if environment.get("bf16") else ""  # without it a training takes several times as long
    return f"{environment['cpu']}{bf16}, {counted(threads, 'thread')}"


def figures_of(bench: str, settings: Mapping[str, Any], rows: Iterable[Row] = (), **more: Any) -> dict[str, Any]:
    """What a measurement's file holds: its name, flags with what they left open, environment, values and units by label."""
    rows = list(rows)
    return {
        "bench": bench,
        "settings": {name: value for name, value in settings.items() if name not in NOT_FIGURES},
        "environment": environment(),
        "headline": {label: value for label, value, _ in rows},
        "unit": {label: unit for label, _, unit in rows},
        **more,
    }


def publish(
    bench: str, settings: Mapping[str, Any], title: str, rows: Sequence[Row], *lines: str, **more: Any
) -> dict[str, Any]:
    """Prints rows as a table with lines under it, and writes the figures, which it returns, to the file that --json names."""
    figures = figures_of(bench, settings, rows, **more)
    if settings["json"]:
        write_figures(Path(settings["json"]), figures)
    table = [(label, spread_text(value, unit)) for label, value, unit in rows]
    print_table(
        figures["environment"], f"{bench} · {title}", ["", "median (quartiles, of n < 4 the range)"], table, *lines
    )
    return figures


def print_table(
    environment: Mapping[str, Any], title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *lines: str
) -> None:
    """Prints a table with a title, and under it lines and the environment."""
    first, *others = columns
    table = Table(first, *(Column(name, justify="right") for name in others))
    for row in rows:
        table.add_row(*row)
    where, gpu = machine_text(environment, "cpu"), environment["gpu"]
    versions = (f"{name} {number}" for name, number in environment["versions"].items())
    footer = " · ".join([where, *([gpu] if gpu else []), environment["date"], *versions])
    for part in (title, table, *lines, footer):
        for_tables().print(part)


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures as JSON, whole or not at all; raises Failure where there can be no such file."""
    text = json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    make_parent(path)
    write_text(path, text)


def make_parent(path: Path) -> None:
    """Makes the folder that a file is to be written to; raises Failure where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}. Choose another place with --json.") from None
