"""Text from outside, such as the name of a file, a class or a run, on its way to a terminal, into a table or a page.

Whatever is printed goes through `say` and `note`, or into a table of `cli.console`, so that nothing in it is obeyed.
"""

from __future__ import annotations

import re
import sys
import unicodedata

MAX_NAME = 300  # characters of a class or a net
# Characters that show nothing, which `str.isprintable` lets pass: fillers, and selectors but for those of emoji.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0d\uffa0\U000e0100-\U000e01ef]")
_JOINERS = "\u200c\u200d"  # in Persian, in scripts of India and in emoji, between two letters of these
# What spreadsheets compute, also where they take the semicolon for the end of a cell (OWASP, CSV Injection).
_FORMULA = re.compile(r"(^|;)('*[=+\-@＝＋－＠])")


def is_name(value: object) -> bool:
    """Whether something can name a class, a net or a run: a text without control characters, and without halves of pairs."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_NAME
        and not {"Cc", "Cs"} & set(map(unicodedata.category, value))
    )


def printable(text: str) -> str:
    """A text on one line, with escapes for what a terminal obeys, and for what is not seen or turns letters round."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if _shows(text, place) else letter.encode("unicode_escape").decode() for place, letter in enumerate(text)
    )


def _shows(text: str, place: int) -> bool:
    if text[place] in _JOINERS:
        around = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
        return len(around) == 2 and around.isprintable() and not any(map(str.isascii, around))
    return text[place].isprintable() and not _BLANK.match(text[place])


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts numbers within names by their value, and otherwise by letters; equal for equal names only."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if place % 2 else (-1, part.casefold()) for place, part in enumerate(parts)], name


def csv_cell(value: object) -> object:
    """A cell for spreadsheets: text that they would compute gets an apostrophe before it; what is no text stays as it is."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    try:
        float(value)
    except ValueError:
        return _FORMULA.sub(r"\1'\2", text)
    return text  # such as a class that is called -1


def duration_text(seconds: float) -> str:
    """As one says it: 85 s, 14 min."""
    return f"{max(1, seconds):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def say(*lines: str) -> None:
    """Prints lines, however long; nothing where there are none."""
    for line in lines:
        print(printable(line))
    sys.stdout.flush()


def note(*lines: str) -> None:
    """Prints lines on stderr, at once."""
    for line in lines:
        print(printable(line), file=sys.stderr)
    sys.stderr.flush()


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
