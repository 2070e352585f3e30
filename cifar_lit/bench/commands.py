"""`cifar-lit bench NAME`: the measurements, each a module of this folder that is imported when it is asked for.

A module has `WHAT` (what is measured), `add_arguments(parser)` and `run(settings)`; one that takes names or passes
flags on to trainings has `main(argv)` in their place.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from cifar_lit.errors import UsageError, nearest

BENCHES = {
    "recipe": "seeds of recipes: accuracy with its interval, warm and cold time, memory",
    "step": "what the Trainer adds to a recipe's steps: ours against a bare loop that does the same work",
    "tutorial": "a tutorial's recipe against its hand-written loop, by steps or by whole epochs with validation",
    "input": "our batches against torchvision transforms in a DataLoader with 0 and with 2 workers",
    "devices": "the CPU against each GPU over batch sizes and widths: time an epoch, images/s, speed-up",
    "scaling": "one recipe and global batch on 1, 2, … devices: time, speed-up, accuracy",
}


def bench(argv: list[str]) -> None:
    """Runs the measurement that is named first in `argv`; raises UsageError for what is none, or cannot be measured."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: cifar-lit bench NAME [flags]\n")
        for name, what in BENCHES.items():
            print(f"  {name:<10} {what}")
        print("\nEach prints a table; --json FILE writes its figures too. `cifar-lit bench NAME --help` lists its flags.")
        return
    name, rest = argv[0], argv[1:]
    if name not in BENCHES:
        raise UsageError(f"no measurement is called {name!r}.{nearest(name, BENCHES)} There are {', '.join(BENCHES)}.")
    from cifar_lit.cli.quiet import quieten

    quieten()
    module = import_module(f"cifar_lit.bench.{name}")
    if hasattr(module, "main"):
        module.main(rest)
    else:
        run_module(f"cifar-lit bench {name}", module, rest)


def run_module(prog: str, module: ModuleType, argv: list[str]) -> None:
    """Parses the flags of a module with `add_arguments`, and runs it."""
    import torch
    from jsonargparse import ArgumentParser

    from cifar_lit.bench.report import make_parent
    from cifar_lit.cli.errors import parsed

    parser = ArgumentParser(prog=prog, description=module.WHAT, exit_on_error=False, allow_abbrev=False)
    module.add_arguments(parser)
    parser.add_argument("--threads", type=int | None, default=None, help="of torch; as many as it takes if not given")
    parser.add_argument("--json", type=str | None, default=None, help="write the figures to this file too")
    settings = parsed(parser, argv)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.json:
        make_parent(Path(settings.json))  # rather now than when all is measured
    module.run(settings)


class PassingParser(argparse.ArgumentParser):
    """For measurements that pass unknown flags on to trainings, which jsonargparse's parser cannot."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """One line in place of the usage screen."""
        raise UsageError(f"{self.prog.removeprefix('cifar-lit ')}: {message}")

    def parse_with_rest(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The settings, and the flags of the trainings; raises UsageError and Failure before anything is run."""
        from cifar_lit.bench.report import make_parent

        settings, rest = self.parse_known_args(argv)
        if settings.runs < 1:
            raise UsageError("a measurement takes at least --runs 1")
        if any(word.partition("=")[0] == "--logs" for word in rest):
            raise UsageError("the runs are only measured, in a folder that is gone afterwards: leave --logs out")
        if settings.json:
            make_parent(Path(settings.json))
        return settings, rest
