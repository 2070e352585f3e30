"""Run a measurement of this folder as a program."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from cifar_lit.bench.commands import run_module
from cifar_lit.bench.progress import ends_at_once
from cifar_lit.cli.errors import explain_error
from cifar_lit.cli.quiet import quieten
from cifar_lit.training.orderly_stop import Interrupted


def set_threads(text: str) -> int:
    """Set the number of torch's threads; the type of a flag."""
    torch.set_num_threads(int(text))
    return int(text)


def run_script() -> int:
    """Run the main module, a measurement as defined in `cifar_lit.bench.commands`; return the exit code."""
    quieten()
    try:
        with ends_at_once():
            run_module(f"python scripts/benchmarks/{Path(sys.argv[0]).name}", sys.modules["__main__"], sys.argv[1:])
    except (Exception, Interrupted) as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0
