"""What every measurement says in the same way: where it was made, how its values spread, a table, and a JSON file of it all.

The figures of a measurement are nested plain values with at least `bench` (its name), `settings`, `environment`, and,
for tables of many measurements, `headline`: {label: value or [low, median, high]} with `unit`: {label: unit}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cifar_lit.errors import Failure
from cifar_lit.files import write_text
from cifar_lit.hardware import detect_machine
from cifar_lit.runs.results import versions

Spread = dict[str, float]  # n, and lower quartile, median and upper quartile as low, median, high


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


def spread(values: Iterable[float]) -> Spread:
    """`n`, `median`, and as `low` and `high` the quartiles, within the range of the values; at least one value."""
    listed = list(values)
    low, median, high = statistics.quantiles(listed, n=4, method="inclusive") if len(listed) > 1 else listed * 3
    return {"n": len(listed), "median": significant(median), "low": significant(low), "high": significant(high)}


def significant(value: float, digits: int = 5) -> float:
    """A number without the digits that no measurement supports."""
    return float(f"{value:.{digits}g}")


def headline(*rows: tuple[str, Spread | float, str]) -> dict[str, Any]:
    """The entries `headline` and `unit` of the figures, from (label, spread or number, unit) each."""

    def flat(value: Spread | float) -> float | list[float]:
        if not isinstance(value, dict):
            return significant(value)
        return [value["low"], value["median"], value["high"]] if value["n"] > 1 else value["median"]

    return {"headline": {label: flat(value) for label, value, _ in rows}, "unit": {label: unit for label, _, unit in rows}}


def settings_of(namespace: Any) -> dict[str, Any]:
    """The settings of a measurement for its figures; what only says where files lie is left out."""
    return {name: value for name, value in namespace.as_dict().items() if name not in ("json", "root", "threads")}


def make_parent(path: Path) -> None:
    """Makes the folder that a file is to be written to; raises Failure where that cannot be done."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures as JSON, whole or not at all; raises Failure where that cannot be done."""
    text = json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    make_parent(path)
    with _explained(path):
        write_text(path, text)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}. Choose another place with --json.") from None


def publish(
    figures: Mapping[str, Any], file: str | None, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *lines: str
) -> None:
    """Writes the figures to a file, if one is named, and prints them as a table with lines and the environment under it."""
    if file:
        write_figures(Path(file), figures)
    show(title, columns, rows, *lines, footer(figures))


def footer(figures: Mapping[str, Any]) -> str:
    """One line that says where and when figures were measured."""
    where = figures["environment"]
    parts = [f"{where['cpu']}, {where['threads']} threads", *([where["gpu"]] if where["gpu"] else []), where["date"]]
    return " · ".join([*parts, *(f"{name} {number}" for name, number in where["versions"].items())])


def spread_text(value: Spread, form: str = ",.0f") -> str:
    """A median with its quartiles, as in `4,335 (4,301 … 4,370)`."""
    if value["n"] == 1:
        return f"{value['median']:{form}}"
    return f"{value['median']:{form}} ({value['low']:{form}} … {value['high']:{form}})"


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
