"""Runs a measurement of this folder as a program: its flags, and what goes wrong as one line with an exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from cifar_lit.bench.commands import run_module
from cifar_lit.cli.errors import explain_error
from cifar_lit.cli.quiet import quieten
from cifar_lit.training.orderly_stop import Interrupted


def run_script() -> int:
    """Runs the program, which is a module as of `cifar_lit.bench.commands`; the exit code."""
    quieten()
    try:
        run_module(f"python scripts/benchmarks/{Path(sys.argv[0]).name}", sys.modules["__main__"], sys.argv[1:])
    except (Exception, Interrupted) as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0
