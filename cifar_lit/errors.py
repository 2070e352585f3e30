"""Failures that a user can mend, each told in one line that names the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from cifar_lit.text import printable


class _OneLine(Exception):
    """An exception whose text stays one line, whatever the file's name or the word holds that it tells of."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Failure(_OneLine, RuntimeError):
    """Something failed while running (network, disk, damaged file, loss not finite): exit code 1."""

    exit_code = 1


class UsageError(_OneLine, ValueError):
    """Something the user typed or configured cannot be meant: exit code 2."""

    exit_code = 2


class InvalidFileError(ValueError):
    """A file claims what cannot be so, or asks for more than it holds; the text says which, as half a sentence."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean X?"` for the choice closest to `word`, or an empty string if none is close.

    Case, dashes, underscores and slashes do not count. A choice that begins with `word` is closer than any other.
    """
    options: dict[str, str] = {}
    for choice in sorted(choices):
        options.setdefault(_letters(choice), choice)
    plain = _letters(word)
    longer = [option for option in options if len(plain) > 2 and option.startswith(plain)]
    close = [min(longer, key=len)] if longer else get_close_matches(plain, options, n=1, cutoff=0.5)
    return f" Did you mean {options[close[0]]}?" if close else ""


def _letters(name: str) -> str:
    return re.sub("[-_ /]", "", name.lower())


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raises UsageError unless `value` is one of the choices that a setting has."""
    if value not in (names := tuple(choices)):
        raise UsageError(f"{setting} must be one of {', '.join(names)}, not {value!r}.{nearest(str(value), names)}")


def first_line(error: BaseException) -> str:
    """What an exception says first, or its name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
