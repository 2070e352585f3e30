"""`cifar-lit recipes`: list the recipes with accuracy and training time, or print recipe files."""

from __future__ import annotations

import re
from pathlib import Path

from rich.table import Table

from cifar_lit.cli import flags
from cifar_lit.cli.console import for_tables
from cifar_lit.errors import UsageError
from cifar_lit.text import say


def list_recipes(argv: list[str]) -> None:
    """Print a table of all recipes, or the files of the given ones."""
    if argv[:1] in (["-h"], ["--help"]):
        say("usage: cifar-lit recipes [NAME]", "", "List the packaged recipes, or print the settings of one.")
        return
    for word in argv:
        if word.startswith("-"):
            raise UsageError(f"recipes has no flag {word}: use `cifar-lit recipes` or `cifar-lit recipes NAME`")
    if argv:
        paths = [flags.packaged_recipe(name) for name in argv]
        for path in paths:
            say(*path.read_text().splitlines())
        return
    # Without column lines, the table fits 100 columns. At 80, only descriptions are wrapped.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("recipe", "what", "accuracy", "data", "time", "measured on"):
        table.add_column(title, no_wrap=title != "what")
    for name in flags.recipe_names():
        header = recipe_header(flags.recipe_path(name))
        what = header[0].removeprefix(f"{name} — ")
        table.add_row(name, what, *measured(header))
    for_tables().print(table)
    say("", "train:    python scripts/train.py --recipe NAME", "details:  cifar-lit recipes NAME")


def recipe_header(path: Path) -> list[str]:
    """Return the comment at the top of a recipe, line by line without the comment signs."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return lines


def measured(header: list[str]) -> tuple[str, str, str, str]:
    """Return accuracy, data set, training time and hardware from the header of a recipe."""
    fields = {}
    for line in header:
        name, _, value = line.partition(":")
        fields[name] = value.strip()
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
