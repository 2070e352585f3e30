"""`cifar-lit compare`: runs beside each other."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from cifar_lit.cli.console import say
from cifar_lit.cli.errors import parsed
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import atomic_write, write_text
from cifar_lit.runs.run_folder import display_path

if TYPE_CHECKING:
    from cifar_lit.runs.compare import McNemar, RunRecord

DESCRIPTION = (
    "Runs beside each other: the settings that differ, accuracy with its 95 % interval (Wilson), time and size; McNemar's test "
    "of runs on the same test images; several seeds of one recipe and settings as mean ± standard deviation."
)
# How the console shows the figures: name, title, form. Figures that are not named here follow as they are.
COLUMNS = (
    ("accuracy", "test accuracy", ".2%"), ("interval", "95 % interval", ""), ("loss", "loss", ".4f"),
    ("val_accuracy", "val accuracy", ".2%"), ("train_seconds", "train s", ",.1f"), ("images_per_second", "images/s", ",.0f"),
    ("parameters", "parameters", ","), ("epochs", "epochs", "d"),
)  # fmt: skip
Pairs = list[tuple[str, str, "McNemar"]]


def compare(words: list[str]) -> None:
    """Compares runs; raises UsageError where there is none, Failure where a file cannot be written."""
    parser = ArgumentParser(prog="cifar-lit compare", description=DESCRIPTION, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("runs", type=str, nargs="+", help="run folders, patterns such as 'logs/laptop-*', or a folder of logs")
    parser.add_argument("--plot", type=str | None, default=None, help="draw the curves of all into this PNG")
    parser.add_argument("--csv", type=str | None, default=None, help="write a row for each run to this file; - for stdout")
    parser.add_argument("--json", type=str | None, default=None, help="write everything to this file; - for stdout")
    settings = parsed(parser, words)
    if settings.csv == settings.json == "-":
        raise UsageError("--csv - and --json - would be mixed on stdout: give one of them a file")

    from cifar_lit.runs.compare import differing, find_runs, groups, pairs, read_run

    runs = [read_run(path) for path in find_runs(settings.runs)]
    if not any(run.metrics or run.settings for run in runs):
        raise UsageError(
            f"there is no run in {' '.join(settings.runs)}: name run folders, a pattern of them, or a folder of logs"
        )
    differences, grouped, (tests, reasons) = differing(runs), groups(runs), pairs(runs)
    several = any(group["accuracy"]["n"] > 1 for group in grouped)
    if settings.plot:
        _plot(runs, _labels(runs, grouped) if several else [run.name for run in runs], Path(settings.plot).expanduser())
    if settings.csv:
        _write(settings.csv, _as_csv(runs, differences))
    if settings.json:
        _write(settings.json, _as_json(runs, differences, grouped, tests))
    if "-" in (settings.csv, settings.json):
        return
    if len(runs) > 1:
        _show_settings(runs, differences)
    _show_figures(runs)
    if several:
        _show_groups(grouped)
    _show_pairs(tests, reasons)
    written = [Path(name).expanduser() for name in (settings.plot, settings.csv, settings.json) if name]
    say(*(f"wrote {display_path(path)}" for path in written))


def _labels(runs: Sequence[RunRecord], grouped: Sequence[dict[str, Any]]) -> list[str]:
    """The name of each run's group with its settings; runs in no group keep their own."""
    labels: dict[str, str] = {}
    for group in grouped:
        label = " · ".join(
            [group["recipe"], *(f"{name.rpartition('.')[2]} {value}" for name, value in group["settings"].items())]
        )
        count = group["accuracy"]["n"]
        labels |= dict.fromkeys(group["runs"], f"{label} (n = {count})" if count > 1 else label)
    return [labels.get(run.name, run.name) for run in runs]


# ---- on the console


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Prints a table, its first columns to the left."""
    table = Table(title=title, title_justify="left", title_style="")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left or column == "note" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _show_settings(runs: Sequence[RunRecord], differences: dict[str, list[str]]) -> None:
    if not differences:
        say("no setting differs between these runs", "")
    elif len(runs) <= len(differences):
        rows = [[name, *values] for name, values in differences.items()]
        _table("settings that differ", ["", *(run.name for run in runs)], rows)
    else:
        rows = [[run.name, *(values[place] for values in differences.values())] for place, run in enumerate(runs)]
        _table("settings that differ", ["run", *differences], rows)


def _show_figures(runs: Sequence[RunRecord]) -> None:
    known = {name for name, _, _ in COLUMNS} | {"low", "high"}
    further = dict.fromkeys(name for run in runs for name in run.figures if name not in known)
    columns = [*COLUMNS, *((name, name.replace("_", " "), ".4f") for name in further)]
    cells: dict[str, list[str]] = {"run": [run.name for run in runs]}
    for name, title, form in columns:
        if name == "interval":
            values = [_interval(*run.interval) if run.interval else "" for run in runs]
        else:
            figures = [run.figures.get(name) for run in runs]
            values = [f"{value:{form}}" if isinstance(value, int | float) else "" for value in figures]
        if any(values) or name == "accuracy":
            cells[title] = values
    if any(run.note for run in runs):
        cells["note"] = [run.note for run in runs]
    _table("results", list(cells), list(zip(*cells.values(), strict=True)))


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{100 * low:.2f} … {100 * high:.2f}"


def _show_groups(grouped: Sequence[dict[str, Any]]) -> None:
    names = list(grouped[0]["settings"])
    rows = []
    for group in sorted(grouped, key=lambda group: -group["accuracy"]["mean"]):
        accuracy, seconds = group["accuracy"], group["train_seconds"]
        deviation = "" if accuracy["std"] is None else f" ± {100 * accuracy['std']:.2f}"
        values = [group["settings"][name] for name in names]
        figures = [str(accuracy["n"]), f"{100 * accuracy['mean']:.2f}%{deviation}", _interval(accuracy["low"], accuracy["high"])]
        rows.append([group["recipe"], *values, *figures, f"{seconds['mean']:,.1f}" if seconds else ""])
    columns = ["recipe", *names, "n", "test accuracy", "95 % interval of the mean", "train s"]
    title = "by recipe and settings, over seeds: mean ± standard deviation; interval by Student's t"
    _table(title, columns, rows, 1 + len(names))


def _show_pairs(tests: Pairs, reasons: Sequence[str]) -> None:
    say(*(pair_line(first, second, test) for first, second, test in tests))
    if tests:
        say("p is McNemar's mid-p: how often chance alone would split those images so unevenly if both were equally good.")
    if len(tests) > 1:
        say(f"Of {len(tests)} pairs of equal nets, {0.05 * len(tests):.1f} would fall below 0.05 by chance.")
    say(*reasons)


def pair_line(first: str, second: str, test: McNemar) -> str:
    """What McNemar's test says of two runs, in words."""
    p = f"p = {test.mid:.3f}" if test.mid >= 0.001 else f"p = {test.mid:.1e}" if test.mid > 1e-300 else "p < 1e-300"
    if test.first == test.second:
        return f"{first} and {second} are right equally often; {test.first} images are named right by one of them only, each."
    better, worse = (first, second) if test.first > test.second else (second, first)
    more, fewer = max(test.first, test.second), min(test.first, test.second)
    verdict = "more than chance" if test.mid < 0.05 else "may be chance"
    counts = f"{more} images are right with it alone, {fewer} with the other alone"
    return f"{better} is ahead of {worse}: {counts}; {p}, {verdict}."


# ---- in files


def _plot(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    from cifar_lit.runs.compare import plot_curves

    try:
        with atomic_write(file) as partial:
            plot_curves(runs, labels, partial)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}. Choose another place with --plot.") from None
    except ValueError as error:
        raise Failure(f"{error}: leave --plot out") from None


def _write(name: str, text: str) -> None:
    """Writes a file, or to stdout for -."""
    if name == "-":
        print(text, end="")
        return
    try:
        write_text(Path(name).expanduser(), text)
    except OSError as error:
        raise Failure(f"cannot write {name}: {error.strerror}. Choose another place.") from None


def _as_csv(runs: Sequence[RunRecord], differences: dict[str, list[str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    writer.writerow(["run", "recipe", *differences, *names, "note"])
    for place, run in enumerate(runs):
        values = [values[place] for values in differences.values()]
        writer.writerow([run.name, run.recipe, *values, *(run.figures.get(name) for name in names), run.note])
    return out.getvalue()


def _as_json(
    runs: Sequence[RunRecord], differences: dict[str, list[str]], grouped: Sequence[dict[str, Any]], tests: Pairs
) -> str:
    content = {
        "runs": [
            {
                "run": run.name, "recipe": run.recipe, "seed": run.seed,
                "settings": {name: run.settings.get(name) for name in differences}, **run.figures, "note": run.note,
            }
            for run in runs
        ],
        "groups": grouped,
        "pairs": [{"first": first, "second": second, "only_first_right": test.first, "only_second_right": test.second,
                   "p_exact": test.exact, "p_mid": test.mid} for first, second, test in tests],
    }  # fmt: skip
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
