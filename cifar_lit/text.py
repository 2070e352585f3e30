"""Untrusted text, such as names of files, classes and runs, made safe for terminals and tables.

All output goes through `say`, `note` or a table of `cli.console`, so a terminal never executes escape sequences.
"""

from __future__ import annotations

import csv
import io
import re
import sys
import unicodedata
from collections.abc import Iterable

MAX_NAME = 300  # characters of a class or a net
# Invisible characters that `str.isprintable` accepts: fillers and variation selectors, except those of emoji.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0d\uffa0\U000e0100-\U000e01ef]")
_JOINERS = "\u200c\u200d"  # valid between letters of Persian and Indic scripts, and in emoji
# Text that spreadsheets execute as a formula, also after a semicolon (OWASP, CSV Injection).
_FORMULA = re.compile(r"(^|;)('*[=+\-@＝＋－＠])")

# Characters and names that Windows reserves. A folder is copied from one system to another.
_NOT_IN_FILE_NAMES = re.compile(r'[<>:"/\\|?*]|[. ]$|^(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)', re.IGNORECASE)
NOT_A_FILE_NAME = """ on every system: leave out / \\ : ? * " < > | and control characters, and names such as con"""


def is_name(value: object) -> bool:
    """Return whether a value is a valid name of a class, net or run: text without control characters and surrogates."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_NAME
        and not {"Cc", "Cs"} & set(map(unicodedata.category, value))
    )


def is_file_name(value: object) -> bool:
    """Return whether a value is a valid name of a file or folder on every system, Windows included."""
    return is_name(value) and _NOT_IN_FILE_NAMES.search(str(value)) is None


def printable(text: str) -> str:
    """Return text on one line, with escapes for control, invisible and direction-changing characters."""
    if text.isascii() and text.isprintable():
        return text
    shown = []
    for index, letter in enumerate(text):
        if _is_visible(text, index):
            shown.append(letter)
        else:
            shown.append(letter.encode("unicode_escape").decode())
    return "".join(shown)


def printable_lines(value: object) -> object:
    """Return a value for a page: text with `printable` lines. Other values, and HTML of our own, stay as they are."""
    if type(value) is not str:  # also Markup
        return value
    return "\n".join(map(printable, value.split("\n")))


def _is_visible(text: str, index: int) -> bool:
    if text[index] in _JOINERS:
        neighbours = text[max(index - 1, 0) : index] + text[index + 1 : index + 2]
        return len(neighbours) == 2 and neighbours.isprintable() and not any(map(str.isascii, neighbours))
    return text[index].isprintable() and not _BLANK.match(text[index])


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that orders numbers within names by value. Only equal names have equal keys."""
    key = []
    for part in re.split(r"([0-9]+)", name):
        if part.isascii() and part.isdigit():
            key.append((int(part), ""))
        else:
            key.append((-1, part.casefold()))
    return key, name


def csv_cell(value: object) -> object:
    """Return a value for a spreadsheet cell. Text that would run as a formula gets an apostrophe in front."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    try:
        float(value)
    except ValueError:
        return _FORMULA.sub(r"\1'\2", text)
    return text  # a number, such as a class named -1


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
        print(printable(line))
    sys.stdout.flush()


def note(*lines: str) -> None:
    """Print lines on stderr."""
    for line in lines:
        print(printable(line), file=sys.stderr)
    sys.stderr.flush()


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
