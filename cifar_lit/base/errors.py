"""Errors that the user can fix. Each message is one line: what happened, then what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

from cifar_lit.base.text import printable

LIBRARY = re.compile(r"\.so\b|\.dylib\b|\.dll\b|DLL load failed")  # compiled code, in messages of the loader


class _OneLine(Exception):
    """An exception whose text is one printable line, even if it quotes names from untrusted files."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Failure(_OneLine, RuntimeError):
    """Failure at run time, such as network, disk, a damaged file or a non-finite loss (exit code 1)."""

    exit_code = 1


class UsageError(_OneLine, ValueError):
    """Invalid command line or configuration (exit code 2)."""

    exit_code = 2


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean X?"` for the choice closest to `word`, or an empty string if none is close.

    Case, dashes, underscores and slashes are ignored. A choice that begins with `word` comes first.
    """
    options: dict[str, str] = {}
    for choice in sorted(choices):
        options.setdefault(_letters(choice), choice)
    plain = _letters(word)
    close = get_close_matches(plain, options, n=1, cutoff=0.5)
    longer = [option for option in options if option.startswith(plain)]
    if longer and len(plain) > 2:
        close = [min(longer, key=len)]
    if not close:
        return ""
    return f" Did you mean {options[close[0]]}?"


def _letters(name: str) -> str:
    return re.sub("[-_ /]", "", name.lower())


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raise UsageError unless `value` is one of the choices."""
    names = tuple(choices)
    if value not in names:
        raise UsageError(f"{setting} must be one of {', '.join(names)}, not {value!r}.{nearest(str(value), names)}")


def check_packages(what: str, packages: Iterable[str], extra: str) -> None:
    """Raise Failure if one of the packages, which an extra of cifar-lit installs, is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise Failure(f"{what} needs missing packages ({', '.join(missing)}): {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f'pip install -e ".[{extra}]" in the clone of cifar-lit'


def unusable_package(error: BaseException) -> str:
    """Return one line for a required package that is missing or does not load; empty for any other error."""
    if isinstance(error, ModuleNotFoundError):
        remedy = "activate its virtual environment, or run pip install -e . in the clone of cifar-lit"
        return f"{error.name} is not installed for {sys.executable}: {remedy}"
    if isinstance(error, (ImportError, OSError)) and LIBRARY.search(str(error)):
        return f"a library does not load ({first_line(error)}): pip install --force-reinstall torch torchvision"
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its class name if there is none."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    return text.splitlines()[0].strip()
