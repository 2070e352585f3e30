"""Progress of long preparations: a live bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

from cifar_lit.text import note, printable

SECONDS_BETWEEN_LINES = 10.0


@cache
def note_once(line: str) -> None:
    """Prints a note once a process, and in one process a machine: a run opens its data several times."""
    if not _is_silent():
        note(line)


def _is_silent() -> bool:
    """The first of a machine's processes speaks for all."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


@contextmanager
def progress(
    what: str, total: int, unit: str = "images", scale: float = 1.0, min_seconds: float = 0.0
) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how far `what` has come, and at its end, after `min_seconds` at least, a line; yields `advance(amount)`.

    total: 0 where it is not known. unit: of amounts once multiplied by `scale` (bytes with unit "MB" and scale 1e-6).
    """
    started = last_line = time.monotonic()
    done, bar = 0, None
    silent = _is_silent()
    if sys.stderr.isatty() and not silent:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(escape(printable(what)), total=total or None, amount="")

    def amount() -> str:
        rate = done * scale / max(time.monotonic() - started, 1e-6)
        of = f"/{total * scale:,.0f}" if total else ""
        return f"{done * scale:,.0f}{of} {unit} · {rate:,.{0 if rate >= 100 else 2}f} {unit}/s"

    def advance(count: int) -> None:
        nonlocal done, last_line
        done += count
        if bar:
            bar.update(task, completed=done, amount=amount())
        elif not silent and time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            note(f"{what}: {amount()}")

    with bar or nullcontext():
        yield advance
    if not silent and time.monotonic() - started >= min_seconds:
        note(f"{what}: {amount()} · {time.monotonic() - started:.1f} s")
