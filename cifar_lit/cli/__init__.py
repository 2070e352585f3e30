"""The command line. Importing it is light; torch and Lightning come with the command that needs them."""

from __future__ import annotations

import sys


def main(words: list[str] | None = None, default: str = "fit") -> int:
    """Runs a command line; returns the exit code: 0, 1 for what failed, 2 for what was typed, 130 after Ctrl-C."""
    from cifar_lit.cli.main import dispatch

    return dispatch(sys.argv[1:] if words is None else words, default)
