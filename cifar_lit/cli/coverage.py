"""The flags of prediction sets, shared by `classify`, `serve` and `export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from cifar_lit.base.errors import UsageError

if TYPE_CHECKING:
    from cifar_lit.inference.model_file import ModelCard
    from cifar_lit.inference.sets import Coverage


def add_coverage(parser: ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    what = "also return a set of classes that contains the true one with this probability, such as 0.95"
    add("--coverage", type=float | None, default=None, metavar="P", help=what)
    add("--sets", type=str, default="lac", help="kind of sets: lac (the smallest) or aps (larger for unsure images)")
    add("--by-class", action="store_true", help="reach the coverage for the images of each class")


def coverage_of(settings: Namespace, card: ModelCard) -> Coverage | None:
    """Return the requested sets, None without --coverage. Raise UsageError if the model cannot give them."""
    from cifar_lit.inference.sets import Coverage, set_limits  # imports torch

    if settings.coverage is None:
        if settings.sets != "lac" or settings.by_class:
            raise UsageError("--sets and --by-class describe prediction sets: add --coverage 0.95")
        return None
    coverage = Coverage(settings.coverage, settings.sets, settings.by_class)
    set_limits(card.coverage, coverage)
    return coverage
