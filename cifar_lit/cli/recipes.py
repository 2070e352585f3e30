"""`cifar-lit recipes`: list the recipes with accuracy and training time, or print recipe files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from rich.table import Table

from cifar_lit.base.text import say
from cifar_lit.cli import flags
from cifar_lit.cli.console import for_tables

# Kinds of machines, see `flags.machine_kind`, in words.
TIMES = {"bf16": "two cores of a CPU with bf16", "cpu": "two cores of a CPU without bf16", "gpu": "a GPU"}


def list_recipes(argv: list[str]) -> None:
    """Print a table of all recipes, or the files of the given ones."""
    if argv[:1] in (["-h"], ["--help"]):
        say("usage: cifar-lit recipes [NAME]", "", "List the packaged recipes, or print the settings of one.")
        return
    for name in argv:
        say(*flags.packaged_recipe(name).read_text(encoding="utf-8").splitlines())
    if argv:
        return
    kind = flags.machine_kind()
    default = flags.DEFAULT_RECIPES[kind]
    rows = []
    for name in flags.recipe_names():
        header = recipe_header(flags.recipe_path(name))
        accuracy, data, times = measured(header)
        seconds = times.get(kind, math.inf)
        time = "–" if math.isinf(seconds) else f"{seconds:,.0f} s"
        title = f"{name} *" if name == default else name
        rows.append((seconds, (title, header[0].removeprefix(f"{name} — "), accuracy, data, time)))
    # At 80 columns, only descriptions are wrapped.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("recipe", "what", "accuracy", "data"):
        table.add_column(title, no_wrap=title != "what")
    table.add_column("time", no_wrap=True, justify="right")
    for _, row in sorted(rows):
        table.add_row(*row)
    for_tables().print(table)
    say(
        "",
        f"* the default here. Time: training on {TIMES[kind]}.",
        "train:    python scripts/train.py --recipe NAME",
        "details:  cifar-lit recipes NAME",
    )


def recipe_header(path: Path) -> list[str]:
    """Return the comment at the top of a recipe, line by line without the comment signs."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return lines


def measured(header: list[str]) -> tuple[str, str, dict[str, float]]:
    """Return accuracy, data set, and training times in seconds by kind of machine from the header of a recipe."""
    fields = {}
    for line in header:
        name, _, value = line.partition(":")
        fields[name] = value.strip()
    score, _, details = fields["Score"].partition("; ")
    if score.startswith("not measured"):
        return "–", "–", {}
    accuracy = score.partition(" (")[0]
    data = fields.get("Data", details).partition(",")[0]
    times = {}
    for kind, phrase in {"bf16": "CPU with bf16", "cpu": "CPU without", "gpu": "GPU"}.items():
        if found := re.search(rf"([\d.,]+) s on a {phrase}(;|$)", fields["Times"]):
            times[kind] = float(found[1].replace(",", ""))
    return accuracy, data, times
