"""`cifar-lit bench NAME`: each measurement is a module of this folder, imported on demand.

A module has `WHAT` (the description), `add_arguments(parser)` and `run(settings)`.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from cifar_lit.cli.errors import OneDefault
from cifar_lit.errors import UsageError, nearest
from cifar_lit.text import say

BENCHES = {
    "recipe": "train recipes with several seeds: accuracy, time and memory",
    "devices": "train one recipe on the CPU and each GPU, or on 1, 2, … devices: time, speed-up, accuracy",
}


def bench(argv: list[str]) -> None:
    """Run the measurement named first in `argv`; raise UsageError for an unknown name or invalid flags."""
    if not argv or argv[0] in ("-h", "--help"):
        say("usage: cifar-lit bench NAME [flags]", "", *(f"  {name:<10} {what}" for name, what in BENCHES.items()), "")
        say("Prints a table; --json FILE also writes the results. `cifar-lit bench NAME --help` lists all flags.")
        return
    name, *arguments = argv
    if name not in BENCHES:
        raise UsageError(f"no measurement is called {name!r}.{nearest(name, BENCHES)} There are {', '.join(BENCHES)}.")
    from cifar_lit.cli.quiet import quieten

    quieten()
    run_module(f"cifar-lit bench {name}", import_module(f"cifar_lit.bench.{name}"), arguments)


class BenchHelp(OneDefault, argparse.ArgumentDefaultsHelpFormatter):
    """Help of argparse with one default for each flag."""


class BenchParser(argparse.ArgumentParser):
    """argparse's parser, because jsonargparse's cannot leave unknown flags for the trainings."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage."""
        raise UsageError(f"{self.prog.removeprefix('cifar-lit ')}: {message}")


def run_module(prog: str, module: ModuleType, argv: list[str]) -> None:
    """Parse the flags of a measurement and run it. If it has `settings.flags`, these get the unknown flags."""
    parser = BenchParser(prog=prog, description=module.WHAT, allow_abbrev=False, formatter_class=BenchHelp)
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    module.add_arguments(parser)
    settings, unknown = parser.parse_known_args(argv)
    settings.line = argv
    if "flags" in settings:
        settings.flags = unknown
    elif unknown:
        raise UsageError(f"there is no flag {unknown[0]}.{nearest(unknown[0], parser._option_string_actions)}")
    from cifar_lit.bench.report import make_parent

    if settings.json:
        make_parent(Path(settings.json))  # fail before the measurement, not after it
    module.run(settings)
