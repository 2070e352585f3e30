"""Run a measurement of this folder as a program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from report import make_parent

from cifar_lit.base.errors import UsageError
from cifar_lit.cli.errors import explain_error
from cifar_lit.cli.quiet import catch_signals, quieten
from cifar_lit.training.orderly_stop import Interrupted, OrderlyStop


def set_threads(text: str) -> int:
    """Set the number of torch's threads; the type of a flag."""
    torch.set_num_threads(int(text))
    return int(text)


def run_module(prog: str, module: ModuleType, argv: list[str]) -> None:
    """Parse the flags of a measurement and run it. If it has `settings.flags`, these get the unknown flags.

    A measurement is a module with `WHAT` (the description), `add_arguments(parser)` and `run(settings)`.
    """
    parser = argparse.ArgumentParser(prog=prog, description=module.WHAT, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    module.add_arguments(parser)
    settings, unknown = parser.parse_known_args(argv)
    settings.line = argv
    if "flags" in settings:
        settings.flags = unknown
    elif unknown:
        raise UsageError(f"there is no flag {unknown[0]}")
    if settings.json:
        make_parent(Path(settings.json))  # fail before the measurement, not after it
    module.run(settings)


def run_script() -> int:
    """Run the main module, a measurement as described in `run_module`; return the exit code."""
    quieten()
    try:
        with ends_at_once():
            run_module(f"python scripts/benchmarks/{Path(sys.argv[0]).name}", sys.modules["__main__"], sys.argv[1:])
    except (Exception, Interrupted) as error:
        line, code = explain_error(error)
        print(line, file=sys.stderr)
        return code
    return 0


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise `Interrupted` at once, also in a training, which needs no checkpoint here.

    An interruption that the measurement has caught to print its results is raised at the end.
    """
    catch_signals()
    Interrupted.latest = None
    signals, OrderlyStop.SIGNALS = OrderlyStop.SIGNALS, ()
    try:
        yield
    except Exception:
        if Interrupted.latest:  # compiled code may replace the exception by another error
            raise Interrupted.latest from None
        raise
    finally:
        OrderlyStop.SIGNALS = signals
    if Interrupted.latest:
        raise Interrupted.latest
