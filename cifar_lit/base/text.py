"""Text from anywhere, such as names of files, classes and runs, made safe for terminals, pages and tables.

All output goes through `say`, `note` or a table of `cli.console`, so a terminal never executes escape sequences.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache

# Control characters, those that change the direction of a line, line separators, and halves of characters.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def is_name(value: str) -> bool:
    """Return whether a text can be the name of a class: not empty, without control characters and invalid Unicode."""
    return bool(value) and not {"Cc", "Cs"} & set(map(unicodedata.category, value))


def printable(text: str) -> str:
    """Return text on one line, with escapes for control and direction-changing characters."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(value: object) -> object:
    """Return a value for a page: text with `printable` lines. Other values, and HTML of our own, stay as they are."""
    if type(value) is not str:  # also Markup
        return value
    return "\n".join(map(printable, value.split("\n")))


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that orders numbers within names by value. Only equal names have equal keys."""
    key = []
    for part in re.split(r"([0-9]+)", name):
        if re.fullmatch("[0-9]+", part):
            key.append((int(part), ""))
        else:
            key.append((-1, part.casefold()))
    return key, name


def quoted(*words: str) -> str:
    """Return words as typed into a shell, in double quotes where needed: Windows' cmd.exe knows no single ones."""
    texts = []
    for word in words:
        if not re.fullmatch(r"[\w@%+=:,./~-]+", word):
            word = '"' + re.sub(r'(["$`])', r"\\\1", word) + '"'
        texts.append(word)
    return " ".join(texts)


def csv_cell(value: object) -> object:
    """Return a value for a spreadsheet cell. Text that would run as a formula gets an apostrophe in front.

    After + or -, only functions and references run; a class named -minus and a number stay as they are.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    if re.match(r"[=@]|[+-].*[(|!=]", text):
        return f"'{text}"
    return text


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows of cells as CSV, safe for a spreadsheet; see `csv_cell`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow(map(csv_cell, row))
    return out.getvalue()


def duration_seconds(text: str) -> float | None:
    """Return the seconds of a duration such as "90s", "10m", "1.5h" or "2d"; None for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        return None
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def say(*lines: str) -> None:
    """Print lines on stdout."""
    for line in lines:
        print(printable(line), flush=True)  # does nothing without a console


def note(*lines: str) -> None:
    """Print lines on stderr."""
    if sys.stderr is None:  # a program without a console, such as pythonw
        return
    for line in lines:
        print(printable(line), file=sys.stderr, flush=True)


def accept_any_encoding() -> None:
    """Make stdout and stderr escape characters that the console's code page lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not in notebooks
            stream.reconfigure(errors="backslashreplace")


def nfc(text: str) -> str:
    """Return text in Unicode's composed form. macOS writes names with separate accents."""
    return unicodedata.normalize("NFC", text)


def listed(names: Iterable[str]) -> str:
    """Return the first three names, and the number of further names."""
    texts = list(names)
    shown = ", ".join(texts[:3])
    if len(texts) > 3:
        shown += f" and {len(texts) - 3:,} more"
    return shown


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def rate_text(images: float) -> str:
    """Return a number of images per second as text, with a decimal if it is small."""
    return f"{images:.{0 if images >= 10 else 1}f} images/s"


SECONDS, SECONDS_IN_FILES = 0.1, 10.0  # before a bar appears, and between its updates


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
) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr, on local rank 0 only. Yields `advance(amount)`.

    Args:
        description: text in front of the bar.
        total: amount at the end; 0 if unknown.
        unit: unit of amounts multiplied by `scale`, such as "MB" with 1e-6 for bytes.
        scale: factor of amounts.
        min_seconds: print a line at the end after at least this time.
    """
    from tqdm import tqdm  # slow to import, and most commands show no bar

    started = time.monotonic()
    is_hidden = _is_silent() or sys.stderr is None
    interval = SECONDS
    if not is_hidden and not sys.stderr.isatty():
        interval = SECONDS_IN_FILES
    with tqdm(
        desc=printable(description), total=total or None, unit=f" {unit}", unit_scale=scale != 1 and scale, leave=False,
        disable=is_hidden, delay=interval, mininterval=interval, dynamic_ncols=True,
    ) as bar:  # fmt: skip
        yield bar.update
    seconds = time.monotonic() - started
    if seconds >= min_seconds and not is_hidden:
        done = bar.n * scale
        rate = done / max(seconds, 1e-6)
        note(f"{description}: {done:,.0f} {unit} · {rate:,.1f} {unit}/s · {seconds:.1f} s")
