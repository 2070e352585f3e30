"""Runs a measurement of this folder as a program: its flags, and what goes wrong as one line with an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from cifar_lit.bench.commands import run_module
from cifar_lit.cli.errors import explain_error
from cifar_lit.cli.quiet import quieten


def run_script(measurement: ModuleType | Callable[[list[str]], None]) -> int:
    """The exit code; `measurement`: a module as of `cifar_lit.bench.commands`, or a function of the words of the line."""
    quieten()
    try:
        if isinstance(measurement, ModuleType):
            run_module(f"python scripts/benchmarks/{Path(sys.argv[0]).name}", measurement, sys.argv[1:])
        else:
            measurement(sys.argv[1:])
    except Exception as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0
