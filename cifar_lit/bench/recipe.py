"""`cifar-lit bench recipe`: `train --seeds` for several recipes, with one file of results."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from functools import cache

from cifar_lit.cli.fit import program
from cifar_lit.cli.flags import parse, recipe_path
from cifar_lit.cli.quiet import catch_signals
from cifar_lit.cli.seeds import train_seeds
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Train recipes with several seeds, each as by `train --recipe NAME --seeds 0-2`: test accuracy with its interval, "
    "time, and with --json memory. A stopped measurement continues if the same command is run again. Other flags are "
    "passed to the trainings."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes or YAML files, before all flags")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds")
    parser.add_argument("--seed0", type=int, default=0, help="the first seed")


def run(settings: argparse.Namespace) -> None:
    """Train each recipe; raise UsageError for invalid settings."""
    recipes = {recipe_path(name).stem: name for name in settings.names}
    if not recipes:
        raise UsageError("bench recipe needs a recipe, as in `cifar-lit bench recipe quickstart --runs 3`")
    if len(recipes) < len(settings.names):
        raise UsageError(f"two recipes have the same name: {', '.join(settings.names)}")
    if settings.runs < 1 or settings.seed0 < 0:
        raise UsageError(f"--runs must be at least 1 and --seed0 at least 0, not {settings.runs} and {settings.seed0}")
    flags = [*settings.flags, f"--seeds={settings.seed0}-{settings.seed0 + settings.runs - 1}"]
    if settings.json:
        flags.append(f"--json={settings.json}")
    # Each data set is decoded once, for all trainings of this process.
    SOURCES.update({name: replace(source, load=cache(source.load)) for name, source in SOURCES.items()})
    catch_signals()
    results: dict[str, object] = {}
    try:
        for name in recipes.values():
            train_seeds(parse("train", [*flags, "--recipe", name]), results)
    except Interrupted as interruption:
        interruption.resume = f"{program('bench recipe')} {shlex.join(settings.line)}"
        raise
