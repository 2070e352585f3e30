"""`cifar-lit compare`: compare the settings and results of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cifar_lit.cli.console import for_tables, write_or_say
from cifar_lit.cli.errors import command_parser, parsed
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import writing
from cifar_lit.runs.compare import (
    Hits,
    RunRecord,
    data_differences,
    differing,
    find_runs,
    group_tests,
    groups,
    hits_by_run,
    pairs,
    plot_curves,
    read_run,
)
from cifar_lit.runs.run_folder import display_path
from cifar_lit.runs.seed_pairs import SeedPairs, seed_pairs
from cifar_lit.stats import SAME, McNemar, limits_text
from cifar_lit.text import csv_text, say

DESCRIPTION = (
    "Compare runs: settings that differ, accuracy with its 95 % interval (Wilson), time, size. Runs on the same test "
    "images are compared with McNemar's test. Several seeds are reported as mean ± standard deviation."
)
# Columns of the console: name, title, format. Further values follow with four digits, except for HIDDEN ones.
COLUMNS = (
    ("accuracy", "accuracy", ".2%"), ("interval", "95 % interval", ""), ("balanced_accuracy", "balanced", ".2%"),
    ("macro_f1", "F1", ".2%"), ("top5", "top 5", ".2%"), ("loss", "loss", ".4f"), ("val_accuracy", "val", ".2%"),
    ("train_seconds", "train s", ",.1f"), ("size", "params", ""),
)  # fmt: skip
UNEQUAL = ("balanced_accuracy", "macro_f1")  # shown if the classes have different numbers of images
# Only in --csv and --json: the table has to fit 100 columns.
HIDDEN = (
    "low", "high", "parameters", "images_per_second", "epochs", "val_balanced_accuracy", "val_macro_f1", "val_top5",
)  # fmt: skip
LISTED = {*HIDDEN, *(name for name, _, _ in COLUMNS)}
MAX_FURTHER = 50  # further columns
Pairs = list[tuple[str, str, McNemar]]


def compare(words: list[str]) -> None:
    """Compare runs; raise UsageError if there are none."""
    parser = command_parser("compare", DESCRIPTION)
    add = parser.add_argument
    add("runs", type=str, nargs="+", help="run folders, patterns such as 'logs/cpu91-*', or a folder of runs")
    add("--plot", type=str | None, default=None, help="draw the learning curves of all runs into this PNG file")
    add("--csv", type=str | None, default=None, help="write a row for each run to this file (- for standard output)")
    add("--json", type=str | None, default=None, help="write all values to this file (- for standard output)")
    text = "a difference in accuracy, in points; for groups of seeds, print how many seeds would find it"
    add("--difference", type=float, default=0.2, help=text)
    settings = parsed(parser, words)
    if not 0 < settings.difference <= 100:
        raise UsageError(f"--difference is in points of accuracy, above 0 and at most 100, not {settings.difference:g}")
    if settings.csv == settings.json == "-":
        raise UsageError("--csv - and --json - cannot both go to standard output: name a file for one of them")

    runs = [read_run(path) for path in find_runs(settings.runs)]
    if not any(run.metrics or run.settings for run in runs):
        raise UsageError(f"no run in {' '.join(settings.runs)}: give run folders, a pattern, or a folder of runs")
    differences, grouped, hits = differing(runs), groups(runs), hits_by_run(runs)
    (tests, reasons), over_seeds = pairs(runs, hits), seed_pairs(grouped, hits)
    several = any(group["accuracy"]["n"] > 1 for group in grouped)
    if settings.plot:
        _plot(settings.plot, runs, grouped if several else [])
    if settings.csv:
        write_or_say("--csv", settings.csv, _as_csv(runs, differences))
    if settings.json:
        write_or_say("--json", settings.json, _as_json(runs, differences, grouped, tests, over_seeds))
    if "-" in (settings.csv, settings.json):
        return
    names = [run.name for run in runs]
    if len(runs) > 1 and not differences:
        say("no setting differs between these runs", "")
    elif 1 < len(runs) <= len(differences):
        _table("settings that differ", ["", *names], [[name, *values] for name, values in differences.items()])
    elif len(runs) > 1:
        _table("settings that differ", ["run", *differences], list(zip(names, *differences.values(), strict=True)))
    _show_figures(runs)
    say(*data_differences(runs))
    if several:
        _show_groups(grouped)
    say(*filter(None, map(repeat_line, grouped)))
    for pair in over_seeds:
        say(*seed_pair_lines(grouped, pair, settings.difference / 100))
    if (count := len(over_seeds)) > 1:
        say(f"Of {count} pairs of equally good groups, {0.05 * count:.1f} would be significant by chance.")
    if over_seeds:  # a test of single nets says less
        tests, reasons = [], []
    for first, second, test in tests:
        say(*pair_lines(first, second, test), *group_differences(first, second, hits))
    if tests:
        say("p: probability of a difference at least as large if both runs were equally good (McNemar's mid-p).")
        say("The test compares these trained nets, not their recipes: for those, compare means over several seeds.")
    if len(tests) > 1:
        say(f"Of {len(tests)} pairs of equally good runs, {0.05 * len(tests):.1f} would have p < 0.05 by chance.")
    say(*reasons)
    for file in filter(None, (settings.plot, settings.csv, settings.json)):
        say(f"wrote {display_path(Path(file).expanduser())}")


# ---- console


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table. left: number of left-aligned columns."""
    table = Table(title=title, title_justify="left", title_style="")
    for number, column in enumerate(columns):
        is_text = number < left or column == "note"
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    for_tables().print(table)


def _show_figures(runs: Sequence[RunRecord]) -> None:
    figures = []
    further: dict[str, None] = {}  # names of other scores
    has_unequal = False  # whether classes of unequal size give another balanced accuracy
    for run in runs:
        row = run.figures
        further |= dict.fromkeys(row)
        if row["low"] and abs(row.get("balanced_accuracy", row["accuracy"]) - row["accuracy"]) > 5e-5:
            has_unequal = True
        figures.append(row | {"interval": limits_text(row, ".2f", 0.01), "size": _size(row)})
    columns = list(COLUMNS)
    for name in [name for name in further if name not in LISTED][:MAX_FURTHER]:
        columns.append((name, name.replace("_", " "), ".4f"))
    cells: dict[str, list[str]] = {"run": [run.name for run in runs]}
    for name, title, form in columns:
        values = [_figure(row.get(name), form) for row in figures]
        if name == "accuracy" or (any(values) and (has_unequal or name not in UNEQUAL)):
            cells[title] = values
    if any(run.note for run in runs):
        cells["note"] = [run.note for run in runs]
    title = "results on the test images; val: accuracy on the validation images"
    _table(title, list(cells), list(zip(*cells.values(), strict=True)))


def _figure(value: object, form: str) -> str:
    """Return a number in a format, or a text without one; empty for other values."""
    if form and isinstance(value, int | float):
        return f"{value:{form}}"
    if not form and isinstance(value, str):
        return value
    return ""


def _size(figures: dict[str, Any]) -> str:
    """Return the number of parameters in thousands or millions."""
    count = figures["parameters"]
    if not count:
        return ""
    if count >= 1e6:
        return f"{count / 1e6:,.1f} M"
    return f"{count / 1e3:,.1f} k"


def _show_groups(grouped: Sequence[dict[str, Any]]) -> None:
    names = list(grouped[0]["settings"])
    rows = []
    for group in sorted(grouped, key=lambda group: -group["accuracy"]["mean"]):
        accuracy, seconds = group["accuracy"], group["train_seconds"]
        mean, time = f"{100 * accuracy['mean']:.2f}%", ""
        if accuracy["std"] is not None:
            mean += f" ± {100 * accuracy['std']:.2f}"
        if seconds:
            time = f"{seconds['mean']:,.1f}"
        figures = [str(accuracy["n"]), mean, limits_text(accuracy, ".2f", 0.01), time]
        rows.append([group["recipe"], *group["settings"].values(), *figures])
    columns = ["recipe", *names, "n", "test accuracy", "95 % interval of the mean", "train s"]
    title = "by recipe and settings, over seeds: mean ± standard deviation; interval by Student's t"
    _table(title, columns, rows, 1 + len(names))


def repeat_line(group: dict[str, Any]) -> str:
    """Return how many runs of a group repeat a seed; empty if none does."""
    runs, seeds = len(group["runs"]), group["accuracy"]["n"]
    if seeds == runs:
        return ""
    repeats = f"{_label(group)}: {runs - seeds} of {runs} runs repeat a seed"
    return f"{repeats}, and only the first run of each seed counts (n = {seeds})"


def seed_pair_lines(grouped: Sequence[dict[str, Any]], pair: SeedPairs, difference: float) -> list[str]:
    """Return the difference between two groups in words. difference: the difference to be found, as a fraction."""
    seeds = pair.over_seeds
    mean = f"{100 * seeds['mean']:+.2f} points over {seeds['n']} equal seeds"
    lines = [f"{_label(grouped[pair.first])} minus {_label(grouped[pair.second])}: {mean}, {seeds['verdict']}"]
    if limits := limits_text(seeds, "+.2f", 0.01):
        lines.append(f"  over seeds, on these test images: 95 % interval {limits}")
    if pair.over_images:
        low, high = pair.over_images
        lines.append(f"  over test images, for these trained nets: 95 % interval {100 * low:+.2f} … {100 * high:+.2f}")
    if seeds["std"] > SAME:
        count = pair.seeds_for(difference)
        lines.append(f"  finding a difference of {100 * difference:g} points takes about {count} seeds (80 % power)")
    return lines


def pair_lines(first: str, second: str, test: McNemar) -> tuple[str, str]:
    """Return the result of McNemar's test of two runs in words."""
    p = "p < 1e-300"
    if test.mid >= 0.001:
        p = f"p = {test.mid:.3f}"
    elif test.mid > 1e-300:
        p = f"p = {test.mid:.1e}"
    better, worse = first, second
    if test.second > test.first:
        better, worse = second, first
    counts = f"  {max(test[:2])} images are correct only in {better}, {min(test[:2])} only in {worse}."
    if test.mid < 0.05:
        return f"{better} is significantly better than {worse} ({p}):", counts
    return f"{better} and {worse} do not differ significantly ({p}):", counts


def group_differences(first: str, second: str, hits: Mapping[str, Hits]) -> list[str]:
    """Return a line for each group of test images in which one of two runs is better by McNemar's test."""
    columns = {**hits[second].columns, **hits[first].columns}
    tests = group_tests(columns, hits[first].correct, hits[second].correct)
    lines = []
    for name, test in tests.items():
        if test.mid < 0.05:
            worse = second
            if test.second > test.first:
                worse = first
            counts = f"{test.first} images are correct only in {first}, {test.second} only in {second}"
            lines.append(f"  {name}: {worse} is worse (p = {test.mid:.2g}): {counts}.")
    if lines:
        lines.append(f"  Of {len(tests)} groups, {0.05 * len(tests):.1f} would have p < 0.05 by chance.")
    return lines


# ---- files


def _label(group: dict[str, Any]) -> str:
    """Return the recipe of a group and the settings in which it differs from others."""
    words = [group["recipe"]]
    for name, value in group["settings"].items():
        words.append(f"{name.rpartition('.')[2]} {value}")
    return " · ".join(words)


def _plot(name: str, runs: Sequence[RunRecord], grouped: Sequence[dict[str, Any]]) -> None:
    """Draw the learning curves. All runs of a group have the group's recipe and settings as their label."""
    labels = {run.name: run.name for run in runs}
    for group in grouped:
        label, count = _label(group), group["accuracy"]["n"]
        if count > 1:
            label = f"{label} (n = {count})"
        labels |= dict.fromkeys(group["runs"], label)
    try:
        with writing(Path(name).expanduser(), "Choose another place with --plot.") as partial:
            plot_curves(runs, list(labels.values()), partial)
    except ValueError as error:
        raise Failure(f"{error}: leave --plot out") from None


def _as_csv(runs: Sequence[RunRecord], differences: dict[str, list[str]]) -> str:
    rows = []
    for index, run in enumerate(runs):
        settings = {name: values[index] for name, values in differences.items()}
        rows.append({"run": run.name, "recipe": run.recipe, **settings, **run.figures, "note": run.note})
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    del names["note"]
    columns = [*names, "note"]
    return csv_text([columns, *([row.get(name) for name in columns] for row in rows)])


def _as_json(
    runs: Sequence[RunRecord],
    differences: dict[str, list[str]],
    grouped: Sequence[dict[str, object]],
    tests: Pairs,
    over_seeds: Sequence[SeedPairs],
) -> str:
    rows = []
    for run in runs:
        settings = {name: run.settings.get(name) for name in differences}
        names = {"run": run.name, "recipe": run.recipe, "seed": run.seed, "settings": settings}
        rows.append(names | run.figures | {"note": run.note})
    compared = []
    for first, second, test in tests:
        counts = {"only_first_right": test.first, "only_second_right": test.second}
        compared.append({"first": first, "second": second, **counts, "p_exact": test.exact, "p_mid": test.mid})
    seeds = [pair._asdict() for pair in over_seeds]
    content = {"runs": rows, "groups": grouped, "pairs": compared, "seed_pairs": seeds}
    return json.dumps(content, indent=2, default=str, skipkeys=True) + "\n"
