"""What every measurement says in the same way: where it was made, how its values spread, a table, and a JSON file of it all."""

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
NOT_FIGURES = ("json", "root", "threads", "names", "line")  # flags that say where files lie, or are told elsewhere


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


def significant(value: float) -> float:
    """A number without the digits that no measurement supports."""
    return float(f"{value:.5g}")


def spread_text(value: Spread, form: str = ",.0f") -> str:
    """A median with its quartiles, as in `4,335 (4,301 … 4,370)`."""
    if value["n"] == 1:
        return f"{value['median']:{form}}"
    return f"{value['median']:{form}} ({value['low']:{form}} … {value['high']:{form}})"


def figures_of(bench: str, settings: Mapping[str, Any], *rows: tuple[str, Spread | float, str], **more: Any) -> dict[str, Any]:
    """The figures of a measurement as nested plain values.

    Args:
        bench: its name.
        settings: its flags, and what they left open.
        rows: the entries `headline`, {label: value or [low, median, high]}, and `unit`, {label: unit}, for tables of many
            measurements: label, spread or number, unit.
        more: further entries.
    """

    def flat(value: Spread | float) -> float | list[float]:
        if not isinstance(value, dict):
            return significant(value)
        return [value["low"], value["median"], value["high"]] if value["n"] > 1 else value["median"]

    return {
        "bench": bench,
        "settings": {name: value for name, value in settings.items() if name not in NOT_FIGURES},
        "environment": environment(),
        "headline": {label: flat(value) for label, value, _ in rows},
        "unit": {label: unit for label, _, unit in rows},
        **more,
    }


def publish(
    figures: Mapping[str, Any], file: str | None, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *lines: str
) -> None:
    """Writes the figures to a file, if one is named, and prints them as a table with lines and the environment under it."""
    if file:
        write_figures(Path(file), figures)
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    where = figures["environment"]
    machine = [f"{where['cpu']}, {where['threads']} threads", *([where["gpu"]] if where["gpu"] else []), where["date"]]
    footer = " · ".join([*machine, *(f"{name} {number}" for name, number in where["versions"].items())])
    # elsewhere than on a terminal no row is to be folded
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    for part in (title, table, *lines, footer):
        console.print(part)


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures as JSON, whole or not at all; raises Failure where that cannot be done."""
    text = json.dumps(figures, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def make_parent(path: Path) -> None:
    """Makes the folder that a file is to be written to; raises Failure where that cannot be done."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}. Choose another place with --json.") from None
