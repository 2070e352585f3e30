"""What every measurement says in the same way: where it was made, how its values spread, and a JSON file of it all.

The figures of a measurement are nested plain values with at least `bench` (its name), `settings`, `environment`, and,
for the table of results, `headline`: {label: value or [low, median, high]} with `unit`: {label: unit}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cifar_lit.cli.run import versions
from cifar_lit.errors import Failure
from cifar_lit.files import write_text
from cifar_lit.hardware import detect_machine

Value = float | list[float]  # a number, or its lower quartile, median and upper quartile


def environment() -> dict[str, Any]:
    """Where and when: date, cpu, threads (of torch), gpu (None where there is none), versions of what matters."""
    found = detect_machine()
    names = sorted({name for name, _ in found.gpus})
    gpu = ", ".join(names) if names else "Apple GPU" if found.mps else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": found.cpu,
        "threads": torch.get_num_threads(),
        "gpu": f"{len(found.gpus)} × {gpu}" if len(found.gpus) > 1 else gpu,
        "versions": versions(),
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """`n`, `median`, and as `low` and `high` the quartiles, within the range of the values; at least one value."""
    found = list(values)
    low, median, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return {"n": len(found), "median": significant(median), "low": significant(low), "high": significant(high)}


def significant(value: float, digits: int = 5) -> float:
    """A number without the digits that no measurement supports."""
    return float(f"{value:.{digits}g}")


def headline(*rows: tuple[str, dict[str, float] | float, str]) -> dict[str, Any]:
    """The entries `headline` and `unit` of the figures, from (label, spread or number, unit) each."""

    def flat(value: dict[str, float] | float) -> Value:
        if not isinstance(value, dict):
            return significant(value)
        return [value["low"], value["median"], value["high"]] if value["n"] > 1 else value["median"]

    return {"headline": {label: flat(value) for label, value, _ in rows}, "unit": {label: unit for label, _, unit in rows}}


def settings_of(namespace: Any) -> dict[str, Any]:
    """The settings of a measurement for its figures; what only says where files lie is left out."""
    return {name: value for name, value in namespace.as_dict().items() if name not in ("json", "root", "threads")}


def make_room(path: Path) -> None:
    """Makes the folder that a file is to be written to; raises Failure where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}. Choose another place with --json.") from None


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Writes the figures as JSON, whole or not at all; raises Failure where that cannot be done."""
    make_room(path)
    text = json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}. Choose another place with --json.") from None


def footer(figures: dict[str, Any]) -> str:
    """One line that says where and when figures were measured."""
    found = figures["environment"]
    parts = [f"{found['cpu']}, {found['threads']} threads", *([found["gpu"]] if found["gpu"] else []), found["date"]]
    return " · ".join([*parts, *(f"{name} {number}" for name, number in found["versions"].items())])


def shown_spread(found: dict[str, float], form: str = ",.0f") -> str:
    """A median with its quartiles, as in `4,335 (4,301 … 4,370)`."""
    if found["n"] == 1:
        return f"{found['median']:{form}}"
    return f"{found['median']:{form}} ({found['low']:{form}} … {found['high']:{form}})"


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *lines: str) -> None:
    """Prints a title, a table, its first column to the left, and lines under it."""
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200)  # elsewhere no row is to be folded
    console.print(title, highlight=False, markup=False)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False)
