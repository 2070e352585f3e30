"""The results in JSON files as Markdown, so that no figure is typed by hand: python scripts/benchmarks/table.py."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from script import run_script

from cifar_lit.bench.commands import BENCHES
from cifar_lit.bench.recipe import percent, texts_of
from cifar_lit.bench.report import machine_text, spread_text
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import display_path

WHAT = "the results in JSON files (`results/` if none are named) as Markdown, into a file with --write"
START, END = "<!-- results -->", "<!-- /results -->"
RUN_COLUMNS = ("recipe", "images", "machine", "n", "test accuracy", "with views", "train s", "cold s", "peak MB", "file")
OTHER_COLUMNS = ("measurement", "machine", "what", "result", "file")
Row = Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`table.py [PATH …] [--recipes] [--write FILE | --check FILE]`."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="JSON files, or folders of them")
    parser.add_argument("--recipes", action="store_true", help="recipes alone, without other measurements")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--write", metavar="FILE", help=f"put the table between the lines {START} and {END} of this file")
    target.add_argument("--check", metavar="FILE", help="fail if the table in this file is not what the results say")


def run(options: argparse.Namespace) -> None:
    """Writes or checks; raises UsageError for what cannot be meant, Failure when a file differs from its results."""
    target_file = options.write or options.check
    file = Path(target_file) if target_file else None
    home = file.absolute().parent if file else Path.cwd()
    text = results_text(json_files(options.paths or ["results"]), home, measurements=not options.recipes)
    if file is None:
        print(text)
        return
    before = _read(file)
    after = put_between(before, text, display_path(file))
    if options.check and after != before:
        line = f"python scripts/benchmarks/table.py {'--recipes ' if options.recipes else ''}--write {display_path(file)}"
        raise Failure(f"the results in {display_path(file)} are out of date: `{line}` renews them")
    if options.write:
        write_text(file, after)
        print(f"{display_path(file)}: {'is up to date' if after == before else 'renewed'}")


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def json_files(paths: Iterable[str]) -> list[Path]:
    """The JSON files among and below some paths, in order; raises UsageError where there are none."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"there is no {path}: name JSON files, or folders of them")
        files += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"there are no results in {' '.join(paths)}: measurements write them with --json")
    return files


def put_between(text: str, table: str, name: str) -> str:
    """`text` with `table` between the marker lines; raises UsageError when they are not both there once, in order."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise UsageError(f"{name} needs the lines {START} and {END} once each, for the table to stand between them")
    head, _, rest = text.partition(START)
    return f"{head}{START}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


# ---- from files to rows


def results_text(files: Sequence[Path], home: Path, measurements: bool = True) -> str:
    """Markdown of the results in JSON files: a table of recipes, what its columns mean, and a table of other `measurements`.

    home: the folder that links to the files start from. Raises UsageError for a file that holds something else.
    """
    runs: list[Row] = []
    others: list[Row] = []
    for file in files:
        try:
            figures = json.loads(file.read_text())
        except (OSError, ValueError):
            raise UsageError(f"{display_path(file)} cannot be read as JSON") from None
        link = f"[{file.stem}]({os.path.relpath(file.absolute(), home).replace(os.sep, '/')})"
        if not isinstance(figures, dict) or not ("bench" in figures or "test" in figures):
            raise UsageError(f"{display_path(file)} holds neither a measurement nor a run's metrics")
        if figures.get("bench") == "recipe":
            runs += [_recipe_row(name, entry, figures, link) for name, entry in figures["recipes"].items()]
        elif "bench" in figures:
            others += [[*row, link] for row in _measurement_rows(figures)]
        else:
            runs.append(_single_row(figures, link))
    legend = (
        "Test accuracy is the mean over n seeds ± their standard deviation; train s, with quartiles, is the whole fit with its "
        "validations, warm where n is above 1; cold s is from the process's start to the tested net."
    )
    parts = [markdown(RUN_COLUMNS, runs), legend] if runs else []
    return "\n\n".join([*parts, *([markdown(OTHER_COLUMNS, others)] if others and measurements else [])])


def markdown(columns: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; columns without an entry in any row are left out."""
    rows = list(rows)
    kept = [place for place in range(len(columns)) if any(row[place] not in ("", "–") for row in rows)]
    lines = [[columns[place] for place in kept], ["---"] * len(kept)]
    lines += [[row[place].replace("|", "\\|") for place in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _recipe_row(name: str, entry: Mapping[str, Any], figures: Mapping[str, Any], link: str) -> Row:
    first, texts = entry["runs"][0], texts_of(entry["runs"])
    machine = machine_text(figures["environment"], first["accelerator"])
    title = f"`{name}`" + _overrides(figures["settings"]["flags"])
    return [title, first["dataset"], machine, *(texts[column] for column in RUN_COLUMNS[3:-1]), link]


def _single_row(metrics: Mapping[str, Any], link: str) -> Row:
    """The row of a run's metrics.json."""
    test, views, seconds = metrics["test"] or {}, (metrics["test"] or {}).get("tta"), metrics["train_seconds"]
    return [
        f"`{metrics['recipe']}`",
        metrics["dataset"],
        f"{metrics['devices']} × {metrics['accelerator']}",
        "1",
        percent(test["accuracy"]) if test else "–",
        f"{percent(views['accuracy'])} ({views['views']})" if views else "–",
        f"{seconds:,.2f}" if seconds is not None else "–",
        "–",
        "–",
        link,
    ]


def _overrides(flags: Sequence[str]) -> str:
    """What was changed on the command line, but for the data set and the device, which have columns of their own."""
    own = ("--data.dataset", "--trainer.devices", "--trainer.accelerator")
    changed = re.findall(r"--\S+(?: (?!--)\S+)?", " ".join(flags))
    kept = [flag for flag in changed if re.split("[= ]", flag)[0] not in own]
    return f" with `{' '.join(kept)}`" if kept else ""


def _measurement_rows(figures: Mapping[str, Any]) -> list[Row]:
    """A row for each of a measurement's headlines: its name, machine, what was measured, the value with its quartiles."""
    machine = machine_text(figures.get("environment") or figures["machine"], figures.get("accelerator"))
    settings = figures.get("settings", {})
    subject = " · ".join(f"{name} {settings[name]}" for name in ("net", "recipe", "dataset", "batch_size") if settings.get(name))
    command = f"bench {figures['bench']}" if figures["bench"] in BENCHES else figures["bench"]
    name = f"`{command}`" + (f" ({subject.replace('_', ' ')})" if subject else "")
    units = figures["unit"]
    return [[name, machine, label, spread_text(value, units.get(label, ""))] for label, value in figures["headline"].items()]


if __name__ == "__main__":
    raise SystemExit(run_script())
