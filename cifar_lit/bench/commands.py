"""`cifar-lit bench NAME`: the measurements, each a module of this folder that is imported when it is asked for.

A module has `WHAT` (what is measured), `add_arguments(parser)` and `run(settings)`, which says how long it will take. When it is
interrupted it shows what it has by then, if anything, with the number of values beside each.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from cifar_lit.errors import UsageError, nearest
from cifar_lit.text import say

BENCHES = {
    "recipe": "seeds of recipes: accuracy with its interval, warm and cold time, memory",
    "step": "what the Trainer adds to a recipe's steps: ours against a bare loop that does the same work",
    "tutorial": "a tutorial's recipe against its hand-written loop, by steps or by whole epochs with validation",
    "input": "our batches against torchvision transforms in a DataLoader with 0 and with 2 workers",
    "devices": "the CPU against each GPU over batch sizes and widths: time an epoch, speed-up",
    "scaling": "one recipe and global batch on 1, 2, … devices: time, speed-up, accuracy",
}


def bench(argv: list[str]) -> None:
    """Runs the measurement that is named first in `argv`; raises UsageError for what is none, or cannot be measured."""
    if not argv or argv[0] in ("-h", "--help"):
        say("usage: cifar-lit bench NAME [flags]", "", *(f"  {name:<10} {what}" for name, what in BENCHES.items()), "")
        say("Each prints a table; --json FILE writes its figures too. `cifar-lit bench NAME --help` lists its flags.")
        return
    name, *rest = argv
    if name not in BENCHES:
        raise UsageError(f"no measurement is called {name!r}.{nearest(name, BENCHES)} There are {', '.join(BENCHES)}.")
    from cifar_lit.cli.quiet import quieten

    quieten()
    run_module(f"cifar-lit bench {name}", import_module(f"cifar_lit.bench.{name}"), rest)


class BenchParser(argparse.ArgumentParser):
    """argparse's, as jsonargparse's parser cannot leave flags over for the trainings."""

    def error(self, message: str) -> NoReturn:
        """One line in place of the usage screen."""
        raise UsageError(f"{self.prog.removeprefix('cifar-lit ')}: {message}")


def run_module(prog: str, module: ModuleType, argv: list[str]) -> None:
    """Reads the flags of a measurement, and runs it.

    What the module does not know goes to its trainings, if it has them: as `flags` of its settings, for which it sets a default.
    """
    help_format = argparse.ArgumentDefaultsHelpFormatter
    parser = BenchParser(prog=prog, description=module.WHAT, allow_abbrev=False, formatter_class=help_format)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    module.add_arguments(parser)
    settings, rest = parser.parse_known_args(argv)
    settings.line = argv
    if "flags" in settings:
        settings.flags = rest
    elif rest:
        raise UsageError(f"there is no flag {rest[0]}.{nearest(rest[0], parser._option_string_actions)}")
    from cifar_lit.bench.progress import ends_at_once
    from cifar_lit.bench.report import make_parent

    if settings.json:
        make_parent(Path(settings.json))  # rather now than when all is measured
    if getattr(settings, "threads", None):
        import torch

        torch.set_num_threads(settings.threads)
    with ends_at_once():
        module.run(settings)
