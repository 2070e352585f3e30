"""Progress of long preparations: a live bar on a terminal, else a plain line every ten seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

from cifar_lit.base.text import note, printable

SECONDS_BETWEEN_LINES = 10.0


@cache
def note_once(line: str) -> None:
    """Print a note once per process, on local rank 0 only. A run opens its data several times."""
    if not _is_silent():
        note(line)


def _is_silent() -> bool:
    """Return whether this process is not the first one on its machine."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


@contextmanager
def progress(
    description: str, total: int, unit: str = "images", scale: float = 1.0, min_seconds: float = 0.0
) -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, on local rank 0 only. Yields `advance(amount)`.

    Args:
        description: text in front of the bar.
        total: amount at the end; 0 if unknown.
        unit: unit of amounts multiplied by `scale`, such as "MB" with 1e-6 for bytes.
        scale: factor of amounts.
        min_seconds: print a line at the end after at least this time.
    """
    if _is_silent():
        yield lambda count: None
        return
    started = last_line = time.monotonic()
    done, bar = 0, None
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        amounts = TextColumn("{task.fields[amount]}")
        columns = (TextColumn("{task.description}"), BarColumn(), amounts, TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(escape(printable(description)), total=total or None, amount="")

    def amount() -> str:
        rate = done * scale / max(time.monotonic() - started, 1e-6)
        of_total = f"/{total * scale:,.0f}" if total else ""
        return f"{done * scale:,.0f}{of_total} {unit} · {rate:,.{0 if rate >= 100 else 2}f} {unit}/s"

    def advance(count: int) -> None:
        nonlocal done, last_line
        done += count
        if bar:
            bar.update(task, completed=done, amount=amount())
        elif time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            note(f"{description}: {amount()}")

    with bar or nullcontext():
        yield advance
    if time.monotonic() - started >= min_seconds:
        note(f"{description}: {amount()} · {time.monotonic() - started:.1f} s")
