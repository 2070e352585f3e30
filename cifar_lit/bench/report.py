"""What every measurement says in the same way: how its values spread, where it was made, a table, and a JSON file of it all."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table

from cifar_lit.cli.console import for_tables
from cifar_lit.errors import Failure
from cifar_lit.files import write_text
from cifar_lit.hardware import detect_machine
from cifar_lit.runs.results import versions

Spread = float | list[float]  # one value; or lower quartile, median and upper quartile of several
Row = tuple[str, Spread, str]  # what was measured, its value, the unit
NOT_FIGURES = ("json", "root", "threads", "names", "line")  # settings that say where files lie, or are told elsewhere


def spread(values: Iterable[float]) -> Spread:
    """The quartiles, within the range of the values; at least one value. Digits that no measurement supports are left out."""
    listed = list(values)
    if len(listed) == 1:
        return float(f"{listed[0]:.5g}")
    return [float(f"{value:.5g}") for value in statistics.quantiles(listed, n=4, method="inclusive")]


def number_text(value: float) -> str:
    """Four digits, and none of them lost before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread_text(value: Spread, unit: str = "", form: str | None = None) -> str:
    """A median with its quartiles, as in `4,335 images/s (4,301 … 4,370)`; form: of the numbers, such as ",.2f"."""
    values = value if isinstance(value, list) else [value]
    texts = [number_text(number) if form is None else f"{number:{form}}" for number in values]
    text = f"{texts[len(texts) // 2]} {unit}".strip()
    return text if len(texts) == 1 else f"{text} ({texts[0]} … {texts[2]})"


def environment() -> dict[str, Any]:
    """Where and when: date, cpu, threads (of torch), gpu (None where there is none), versions of what matters."""
    machine = detect_machine()
    names = sorted({name for name, _ in machine.gpus})
    gpu = ", ".join(names) if names else "Apple GPU" if machine.mps else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": machine.cpu,
        "threads": torch.get_num_threads(),
        "gpu": f"{len(machine.gpus)} × {gpu}" if len(machine.gpus) > 1 else gpu,
        "versions": versions(),
    }


def machine_text(environment: Mapping[str, Any], accelerator: str | None = None) -> str:
    """The GPU where there is one, unless `accelerator` is the CPU; else the CPU with torch's threads."""
    if environment.get("gpu") and accelerator != "cpu":
        return str(environment["gpu"])
    threads = environment["threads"]
    return f"{environment['cpu']}, {threads} thread{'s' * (threads != 1)}"


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


def publish(bench: str, settings: Mapping[str, Any], title: str, rows: Sequence[Row], *lines: str, **more: Any) -> dict[str, Any]:
    """Prints rows as a table with lines under it, and writes the figures, which it returns, to the file that --json names."""
    figures = figures_of(bench, settings, rows, **more)
    if settings["json"]:
        write_figures(Path(settings["json"]), figures)
    table = [(label, spread_text(value, unit)) for label, value, unit in rows]
    print_table(figures["environment"], f"{bench} · {title}", ["", "median (quartiles)"], table, *lines)
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
