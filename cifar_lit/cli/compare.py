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
from cifar_lit.runs.run_folder import display_path, write_text

if TYPE_CHECKING:
    from cifar_lit.runs.compare import McNemar, RunRecord

DESCRIPTION = (
    "Runs beside each other: the settings that differ, accuracy with its 95 % interval (Wilson), time and size; McNemar's test "
    "of runs on the same test images; several seeds of one recipe and settings as mean ± standard deviation."
)
METRICS = ("accuracy", "low", "high", "loss", "val_accuracy", "train_seconds", "images_per_second", "parameters", "epochs")
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
    differences = differing(runs)
    grouped = groups(runs)
    several = any(group["accuracy"]["n"] > 1 for group in grouped)
    tests, reasons = pairs(runs)
    rows = [_figures(run) for run in runs]
    if settings.plot:
        _plot(runs, _labels(runs, grouped) if several else [run.name for run in runs], Path(settings.plot).expanduser())
    _write(settings.csv, lambda: _as_csv(runs, rows, differences))
    _write(settings.json, lambda: _as_json(runs, rows, differences, grouped, tests))
    if "-" in (settings.csv, settings.json):
        return
    _show_settings(runs, differences)
    _show_metrics(runs, rows)
    if several:
        _show_groups(grouped)
    _show_pairs(tests, reasons)
    written = [Path(name).expanduser() for name in (settings.plot, settings.csv, settings.json) if name]
    say(*(f"wrote {display_path(path)}" for path in written))


def _figures(run: RunRecord) -> dict[str, Any]:
    """The figures of a run by the names in `METRICS`, None where it has none."""
    low, high = run.interval or (None, None)
    val = run.metrics.get("val")
    return {
        "accuracy": run.test.get("accuracy"),
        "low": low,
        "high": high,
        "loss": run.test.get("loss"),
        "val_accuracy": val.get("accuracy") if isinstance(val, dict) else None,
        **{name: run.metrics.get(name) for name in METRICS[5:]},
    }


def _labels(runs: Sequence[RunRecord], grouped: Sequence[dict[str, Any]]) -> list[str]:
    """The name of each run's group with its settings; runs in no group keep their own."""
    found: dict[str, str] = {}
    for group in grouped:
        label = " · ".join(
            [group["recipe"], *(f"{name.rpartition('.')[2]} {value}" for name, value in group["settings"].items())]
        )
        count = group["accuracy"]["n"]
        found |= dict.fromkeys(group["runs"], f"{label} (n = {count})" if count > 1 else label)
    return [found.get(run.name, run.name) for run in runs]


# ---- on the console


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Prints a table, its first columns to the left."""
    table = Table(title=title, title_justify="left", title_style="")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left or column == "note" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _show_settings(runs: Sequence[RunRecord], differences: dict[str, list[str]]) -> None:
    if len(runs) < 2:
        return
    if not differences:
        say("no setting differs between these runs", "")
        return
    if len(runs) <= len(differences):
        rows = [[name, *values] for name, values in differences.items()]
        _table("settings that differ", ["", *(run.name for run in runs)], rows)
    else:
        rows = [[run.name, *(values[place] for values in differences.values())] for place, run in enumerate(runs)]
        _table("settings that differ", ["run", *differences], rows)


def _show_metrics(runs: Sequence[RunRecord], rows: Sequence[dict[str, Any]]) -> None:
    columns = [
        "run",
        "test accuracy",
        "95 % interval",
        "loss",
        "val accuracy",
        "train s",
        "images/s",
        "parameters",
        "epochs",
        "note",
    ]
    table = []
    for run, found in zip(runs, rows, strict=True):
        interval = "" if found["low"] is None else f"{100 * found['low']:.2f} … {100 * found['high']:.2f}"
        numbers = [
            _text(found["accuracy"], ".2%"), interval, _text(found["loss"], ".4f"), _text(found["val_accuracy"], ".2%"),
            _text(found["train_seconds"], ",.1f"), _text(found["images_per_second"], ",.0f"), _text(found["parameters"], ","),
            _text(found["epochs"], "d"),
        ]  # fmt: skip
        table.append([run.name, *numbers, run.note])
    kept = [place for place in range(len(columns)) if place < 2 or any(row[place] for row in table)]
    _table("results", [columns[place] for place in kept], [[row[place] for place in kept] for row in table])


def _show_groups(grouped: Sequence[dict[str, Any]]) -> None:
    names = list(grouped[0]["settings"])
    rows = []
    for group in sorted(grouped, key=lambda group: -group["accuracy"]["mean"]):
        found, seconds = group["accuracy"], group["train_seconds"]
        deviation = "" if found["std"] is None else f" ± {100 * found['std']:.2f}"
        interval = "" if found["low"] is None else f"{100 * found['low']:.2f} … {100 * found['high']:.2f}"
        values = [group["settings"][name] for name in names]
        time = f"{seconds['mean']:,.1f}" if seconds else ""
        rows.append([group["recipe"], *values, str(found["n"]), f"{100 * found['mean']:.2f}%{deviation}", interval, time])
    columns = ["recipe", *names, "n", "test accuracy", "95 % interval of the mean", "train s"]
    _table(
        "by recipe and settings, over seeds: mean ± standard deviation; interval by Student's t", columns, rows, 1 + len(names)
    )


def _show_pairs(tests: Pairs, reasons: Sequence[str]) -> None:
    for first, second, found in tests:
        say(pair_line(first, second, found))
    if tests:
        say("p is McNemar's mid-p: how often chance alone would split those images so unevenly if both were equally good.")
    if len(tests) > 1:
        say(f"Of {len(tests)} pairs of equal nets, {0.05 * len(tests):.1f} would fall below 0.05 by chance.")
    say(*reasons)


def pair_line(first: str, second: str, found: McNemar) -> str:
    """What McNemar's test says of two runs, in words."""
    p = f"p = {found.mid:.3f}" if found.mid >= 0.001 else f"p = {found.mid:.1e}" if found.mid > 1e-300 else "p < 1e-300"
    if found.first == found.second:
        return f"{first} and {second} are right equally often; {found.first} images are named right by one of them only, each."
    better, worse = (first, second) if found.first > found.second else (second, first)
    verdict = "more than chance" if found.mid < 0.05 else "may be chance"
    counts = (
        f"{max(found.first, found.second)} images are right with it alone, {min(found.first, found.second)} with the other alone"
    )
    return f"{better} is ahead of {worse}: {counts}; {p}, {verdict}."


def _text(value: Any, form: str) -> str:
    return f"{value:{form}}" if isinstance(value, int | float) else ""


# ---- in files


def _plot(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    from cifar_lit.runs.compare_plot import plot_curves
    from cifar_lit.runs.run_folder import atomic_write

    try:
        with atomic_write(file) as partial:
            plot_curves(runs, labels, partial)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}. Choose another place with --plot.") from None
    except ValueError as error:
        raise Failure(f"{error}: leave --plot out") from None


def _write(name: str | None, text: Any) -> None:
    """Writes what `text` returns to the file, or to stdout for -; nothing for None."""
    if name is None:
        return
    if name == "-":
        print(text(), end="")
        return
    try:
        write_text(Path(name).expanduser(), text())
    except OSError as error:
        raise Failure(f"cannot write {name}: {error.strerror}. Choose another place.") from None


def _as_csv(runs: Sequence[RunRecord], rows: Sequence[dict[str, Any]], differences: dict[str, list[str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "recipe", *differences, *METRICS, "note"])
    for place, (run, found) in enumerate(zip(runs, rows, strict=True)):
        values = [values[place] for values in differences.values()]
        writer.writerow([run.name, run.recipe, *values, *(found[name] for name in METRICS), run.note])
    return out.getvalue()


def _as_json(
    runs: Sequence[RunRecord],
    rows: Sequence[dict[str, Any]],
    differences: dict[str, list[str]],
    grouped: Sequence[dict[str, Any]],
    tests: Pairs,
) -> str:
    found = {
        "runs": [
            {
                "run": run.name, "recipe": run.recipe, "seed": run.seed,
                "settings": {name: run.settings.get(name) for name in differences}, **figures, "note": run.note,
            }
            for run, figures in zip(runs, rows, strict=True)
        ],
        "groups": grouped,
        "pairs": [{"first": first, "second": second, "only_first_right": test.first, "only_second_right": test.second,
                   "p_exact": test.exact, "p_mid": test.mid} for first, second, test in tests],
    }  # fmt: skip
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"
