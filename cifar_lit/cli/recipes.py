"""`cifar-lit recipes`: list the recipes with accuracy and training time, or print recipe files."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from rich.table import Column, Table

from cifar_lit.cli import flags
from cifar_lit.cli.console import for_tables
from cifar_lit.errors import UsageError
from cifar_lit.text import say


def list_recipes(argv: list[str]) -> None:
    """Print a table of all recipes, or the files of the given ones."""
    if argv[:1] in (["-h"], ["--help"]):
        say("usage: cifar-lit recipes [NAME]", "", "List the packaged recipes, or print the settings of one.")
        return
    if unknown := next((word for word in argv if word.startswith("-")), None):
        raise UsageError(f"recipes has no flag {unknown}: use `cifar-lit recipes` or `cifar-lit recipes NAME`")
    for path in [flags.packaged_recipe(name) for name in argv]:
        say(*path.read_text().splitlines())
    if argv:
        return
    # Without column lines, the table fits 100 columns. At 80, only descriptions are wrapped.
    fixed = (Column(name, no_wrap=True) for name in ("accuracy", "data", "time", "measured on"))
    table = Table(Column("recipe", no_wrap=True), "what", *fixed, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in flags.recipe_names():
        header = recipe_header(flags.recipe_path(name))
        what = header[0].removeprefix(f"{name} — ")
        table.add_row(name, what, *measured(header))
    for_tables().print(table)
    say("", "train:    python scripts/train.py --recipe NAME", "details:  cifar-lit recipes NAME")


def recipe_header(path: Path) -> list[str]:
    """Return the comment at the top of a recipe, line by line without the comment signs."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [line.removeprefix("#").removeprefix(" ") for line in lines]


def measured(header: list[str]) -> tuple[str, str, str, str]:
    """Return accuracy, data set, training time and hardware from the header of a recipe."""
    fields = {name: value.strip() for name, colon, value in (line.partition(":") for line in header) if colon}
    score, _, details = fields["Score"].partition("; ")
    if score.startswith("not measured"):
        return "–", "–", "–", "not yet"
    if score.startswith("as "):
        return score, score, score, score
    accuracy = score.partition(" (")[0]
    data = fields.get("Data", details).partition(",")[0]
    seconds = float(fields["Time"].partition(" s")[0])
    threads = re.search(r"(\d+) threads?", fields["Hardware"])
    hardware = f"{threads[1]} CPU threads" if threads else fields["Hardware"].partition(", ")[0]
    return accuracy, data, f"{seconds:.0f} s", hardware
