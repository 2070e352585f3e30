"""`cifar-lit recipes`: what each recipe is and reaches, and the file of one."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from rich.table import Table

from cifar_lit.cli import flags
from cifar_lit.cli.console import for_tables
from cifar_lit.errors import UsageError
from cifar_lit.text import say


def list_recipes(argv: list[str]) -> None:
    """Prints every recipe in a line, or the files of those that are named: header and settings."""
    if argv[:1] in (["-h"], ["--help"]):
        say("usage: cifar-lit recipes [NAME]", "", "lists the packaged recipes, or prints the settings of one")
        return
    if unknown := next((word for word in argv if word.startswith("-")), None):
        raise UsageError(f"recipes knows no flag {unknown}: use `cifar-lit recipes` or `cifar-lit recipes NAME`")
    for path in [flags.packaged_recipe(name) for name in argv]:
        say(*path.read_text().splitlines())
    if argv:
        return
    table = Table("recipe", "what", "accuracy", "time")
    for name in flags.recipe_names():
        header = recipe_header(flags.recipe_path(name))
        what = header[0].removeprefix(f"{name} — ")
        table.add_row(name, what, _summary(header, "Score"), _summary(header, "Time"))
    for_tables().print(table)
    say("start one:  python scripts/train.py --recipe NAME", "about one:  cifar-lit recipes NAME")


def recipe_header(path: Path) -> list[str]:
    """The comment on top of a recipe, line by line without the comment signs."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").removeprefix(" ") for line in lines]


def _summary(header: list[str], field: str) -> str:
    """What a recipe's header says in a field, up to the details after a semicolon; of times without their spread."""
    value = next(line for line in header if line.startswith(f"{field}:")).partition(":")[2].partition(";")[0].strip()
    return "–" if value.startswith("not measured") else value if field == "Score" else value.partition(" (")[0]
