"""The command line of measurements that hand what they do not know on to a training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cifar_lit.bench.report import make_room
from cifar_lit.errors import UsageError


class PassingParser(argparse.ArgumentParser):
    """argparse rather than jsonargparse, which cannot leave flags that it does not know to someone else."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """One line in place of the usage screen."""
        raise UsageError(f"{self.prog.removeprefix('cifar-lit ')}: {message}")


def check_passed_on(settings: argparse.Namespace, passed_on: Sequence[str]) -> None:
    """Checks --runs, --json and the training's flags before anything is run; raises UsageError and Failure."""
    if settings.runs < 1:
        raise UsageError("a measurement takes at least --runs 1")
    if any(word.partition("=")[0] == "--logs" for word in passed_on):
        raise UsageError("the runs are only measured, in a folder that is gone afterwards: leave --logs out")
    if settings.json:
        make_room(Path(settings.json))
