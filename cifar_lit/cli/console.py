"""What is printed around a run: the start card and the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rich
from rich.console import Console
from rich.panel import Panel
from rich.table import Table


def start_card(rows: Sequence[tuple[str, str]], title: str) -> None:
    """Prints what is about to run, as a box on a terminal and as plain lines elsewhere."""
    if not sys.stdout.isatty():
        for name, value in rows:
            print(f"{name:<12} {value}")
        sys.stdout.flush()
        return
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(f"[dim]{name}[/]", value)
    rich.get_console().print(Panel(grid, title=title, title_align="left", expand=False))


def accuracy_table(classes: Sequence[str], per_class: Sequence[float], counts: Sequence[int]) -> None:
    """Prints the accuracy of each class; of more than 30 only the ten best and the ten worst."""
    table = Table(title="test accuracy per class", title_justify="left", title_style="")
    table.add_column("class")
    table.add_column("accuracy", justify="right")
    table.add_column("images", justify="right")
    rows = list(zip(classes, per_class, counts, strict=True))
    if len(rows) > 30:
        rows.sort(key=lambda row: -row[1])
        rows[10:-10] = [("…", 0.0, 0)]
    for name, accuracy, count in rows:
        table.add_row(name, "" if name == "…" else f"{accuracy:.4f}" if count else "no image", "" if name == "…" else str(count))
    rich.get_console().print(table)


def say(*lines: str) -> None:
    """Prints lines as they are, however long."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def for_tables() -> Console:
    """As wide as the terminal; elsewhere so wide that no row is folded, which rich would do at 80 columns."""
    return Console(width=None if sys.stdout.isatty() else 200)
