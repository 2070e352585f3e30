"""`cifar-lit compare`: compare the settings and results of runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from cifar_lit.base.command_line import command_parser, parsed
from cifar_lit.base.errors import UsageError
from cifar_lit.base.stats import MIN_VALUES, SIGNIFICANT, limits_text
from cifar_lit.base.text import counted, say
from cifar_lit.cli.console import for_tables, say_wrapped, unbroken
from cifar_lit.runs.compare import (
    PairTest,
    RunRecord,
    data_differences,
    differing,
    find_runs,
    pairs,
    read_run,
)
from cifar_lit.runs.seeds import Group, SeedPairs, groups, seed_pairs
from cifar_lit.training.score import METRICS

DESCRIPTION = (
    "Compare runs: settings that differ, accuracy with its 95 % interval (Wilson), time, size. Runs on the same test "
    "images are compared with McNemar's test. Several seeds are reported as mean ± standard deviation."
)
# Columns of the console: name, title, format. Other scores on the test images follow with four digits.
COLUMNS = {
    "accuracy": ("accuracy", ".2%"), "interval": ("95 % interval", ""),
    **{name: (metric.column, ".2%") for name, metric in METRICS.items()},
    "loss": ("loss", ".4f"), "val_accuracy": ("val", ".2%"),
    "train_seconds": ("train s", ",.1f"), "parameters": ("params", ","),
}  # fmt: skip


def compare(words: list[str]) -> None:
    """Compare runs; raise UsageError if there are none."""
    parser = command_parser("compare", DESCRIPTION)
    names = "run folders, patterns such as 'logs/cpu91-*', or a folder of runs"
    parser.add_argument("runs", type=str, nargs="+", help=names)
    settings = parsed(parser, words)
    runs = [read_run(path) for path in find_runs(settings.runs)]
    if not any(run.metrics or run.settings for run in runs):
        raise UsageError(f"no run in {' '.join(settings.runs)}: give run folders, a pattern, or a folder of runs")
    grouped = groups(runs)
    tests, reasons = pairs(runs)
    over_seeds = seed_pairs(grouped)
    if len(runs) > 1:
        _show_differences(runs, differing(runs))
    _show_figures(runs)
    say_wrapped(*data_differences(runs))
    _show_groups(grouped)
    if over_seeds:
        for pair in over_seeds:
            say_wrapped(*seed_pair_lines(grouped, pair))
        if len(over_seeds) > 1:
            say(f"p is corrected for {len(over_seeds)} pairs (Holm).")
    else:  # a test of single nets says less
        say_wrapped(*pair_lines(tests), *reasons)


# ---- console


def _show_differences(runs: Sequence[RunRecord], differences: dict[str, list[str]]) -> None:
    names = [run.name for run in runs]
    if not differences:
        say("no setting differs between these runs", "")
    elif len(runs) <= len(differences):
        _table("settings that differ", ["", *names], [[name, *values] for name, values in differences.items()])
    else:
        _table("settings that differ", ["run", *differences], list(zip(names, *differences.values(), strict=True)))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table, or a paragraph for each row if the table is wider than the console.

    left: number of left-aligned columns.
    """
    table = Table(title=title, title_justify="left", title_style="")
    for number, column in enumerate(columns):
        is_text = number < left or column == "note"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = for_tables()
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(table)
        return
    say_wrapped(f"{title}:")
    for row in rows:
        cells = [unbroken(f"{column} {cell}") for column, cell in zip(columns, row, strict=True) if cell]
        say(f"  {row[0]}")
        say_wrapped("    " + "\xa0· ".join(cells[1:]))
    say("")


def _show_figures(runs: Sequence[RunRecord]) -> None:
    figures = [run.figures for run in runs]
    columns = dict(COLUMNS)
    for row in figures:
        for name in row:
            if not name.startswith("val_"):
                columns.setdefault(name, (name.replace("_", " "), ".4f"))
    cells: dict[str, list[str]] = {"run": [run.name for run in runs]}
    for name, (title, form) in columns.items():
        values = ["" if row.get(name) is None else f"{row[name]:{form}}" for row in figures]
        is_repetition = name == "balanced_accuracy" and values == cells["accuracy"]  # classes of equal size
        if any(values) and not is_repetition:
            cells[title] = values
    if any(run.note for run in runs):
        cells["note"] = [run.note for run in runs]
    title = "results on the test images; val: accuracy on the validation images"
    _table(title, list(cells), list(zip(*cells.values(), strict=True)))


def _show_groups(grouped: Sequence[Group]) -> None:
    """Print a table if a group has several seeds, and which groups repeat a seed."""
    rows = []
    has_seeds = False
    for group in sorted(grouped, key=lambda group: -group.accuracy["mean"]):
        accuracy, seconds = group.accuracy, group.train_seconds
        mean, time = f"{100 * accuracy['mean']:.2f}%", ""
        if accuracy["std"] is not None:
            mean += f" ± {100 * accuracy['std']:.2f}"
            has_seeds = True
        if seconds:
            time = f"{seconds['mean']:,.1f}"
        figures = [str(accuracy["n"]), mean, limits_text(accuracy, ".2f", 0.01), time]
        rows.append([group.recipe, *group.settings.values(), *figures])
    if has_seeds:
        names = list(grouped[0].settings)
        columns = ["recipe", *names, "n", "test accuracy", "95 % interval of the mean", "train s"]
        title = "by recipe and settings, over seeds: mean ± standard deviation; interval by Student's t"
        _table(title, columns, rows, 1 + len(names))
    say_wrapped(*filter(None, map(repeat_line, grouped)))


def repeat_line(group: Group) -> str:
    """Return how many runs of a group repeat a seed; empty if none does."""
    runs, seeds = len(group.runs), group.accuracy["n"]
    if seeds == runs:
        return ""
    repeats = f"{_label(group)}: {runs - seeds} of {runs} runs repeat a seed"
    return f"{repeats}, and only the first run of each seed counts (n = {seeds})"


def seed_pair_lines(grouped: Sequence[Group], pair: SeedPairs) -> list[str]:
    """Return the difference between two groups in words."""
    seeds = pair.over_seeds
    mean = f"{100 * seeds['mean']:+.2f} points over {seeds['n']} equal seeds"
    verdict = f"not significant (p = {seeds['p'] or 0:.2g})"
    if seeds["n"] < MIN_VALUES:
        verdict = f"no verdict from fewer than {MIN_VALUES} seeds"
    elif seeds["p"] is None:
        verdict = "no verdict, because all differences are equal"
    elif seeds["p"] < SIGNIFICANT:
        verdict = verdict.removeprefix("not ")
    lines = [f"{_label(grouped[pair.first])} minus {_label(grouped[pair.second])}: {mean}, {verdict}"]
    if limits := limits_text(seeds, "+.2f", 0.01):
        lines.append(f"  over seeds, on these test images: 95 % interval {limits}")
    return lines


def pair_lines(tests: Sequence[PairTest]) -> list[str]:
    """Return the results of McNemar's tests in words."""
    lines = []
    for test in tests:
        better, worse = unbroken(test.first), unbroken(test.second)
        more, fewer = test.only_first, test.only_second
        if fewer > more:
            better, worse = worse, better
            more, fewer = fewer, more
        result = f"{better} and {worse} do not differ significantly"
        if test.p < SIGNIFICANT:
            result = f"{better} is significantly better than {worse}"
        counts = f"{counted(more, 'image')} correct only in the first, {fewer:,} only in the second."
        lines.append(f"{result} (p = {test.p:.2g}): {counts}")
    if tests:
        lines.append(
            "p: probability of a difference at least as large if both runs were equally good (McNemar's mid-p)."
        )
        lines.append("The test compares these trained nets, not their recipes: compare those over several seeds.")
    if len(tests) > 1:
        lines.append(f"p is corrected for the number of tests (Holm): {len(tests)} pairs")
    return lines


def _label(group: Group) -> str:
    """Return the recipe of a group and the settings in which it differs from others."""
    words = [group.recipe]
    for name, value in group.settings.items():
        words.append(f"{name.rpartition('.')[2]} {value}")
    return " · ".join(words)
