"""Every figure of the pages and of the recipes' headers, written from the JSON files: python scripts/benchmarks/table.py --write.

A page holds a figure as a link to its file, whose title is the figure's label there:

    [91.69 ± 0.17 % (n = 3)](results/cpu/recipe-laptop.json "laptop: test accuracy")

and, as long as that file does not exist, as UNMEASURED with the rest in a comment behind it. Tables of all results stand
between `<!-- results -->` (or `<!-- results: recipes -->`) and `<!-- /results -->`. A recipe's header names its file, from
which its score, time, hardware and date are.
"""

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
from cifar_lit.bench.recipe import LEGEND, mean_text, texts_of
from cifar_lit.bench.report import machine_text, spread_text
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import write_text
from cifar_lit.runs.run_folder import display_path

WHAT = "the results in JSON files (`results/` if none are named) as Markdown; or, from a checkout, all figures of its pages"
UNMEASURED = "not measured on published pixels yet"
PAGES = ("README.md", "docs/*.md", "results/README.md", "cifar_lit/recipes/*.yaml")
FIGURE = re.compile(
    r'\[[^\]\n]*\]\((?P<file>[^)\s]+\.json) "(?P<label>[^"\n]+)"\)'
    rf'|{UNMEASURED}<!-- (?P<absent>\S+\.json) "(?P<title>[^"\n]+)" -->'
)
TABLE = re.compile(r"(<!-- results(: recipes)? -->\n).*?(<!-- /results -->)", re.DOTALL)
RUN_COLUMNS = ("test accuracy", "with views", "training", "start to end", "peak memory")
OTHER_COLUMNS = ("measurement", "machine", "what", "result", "file")
Row = Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`table.py [PATH …]`, or `--write`, or `--check`."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="JSON files, or folders of them")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--write", action="store_true", help="renew the figures of README, docs, results and recipes")
    target.add_argument("--check", action="store_true", help="fail if one of them is not what its file says")


def run(options: argparse.Namespace) -> None:
    """Prints, writes or checks; raises UsageError for what cannot be meant, Failure when a page differs from its files."""
    if not (options.write or options.check):
        print(results_text(json_files(options.paths or ["results"]), Path.cwd()))
        return
    changed = {page: text for page, text in renewed_pages(Path.cwd()).items() if text != page.read_text()}
    if options.check and changed:
        pages = ", ".join(map(display_path, changed))
        raise Failure(
            f"figures of {pages} are not those of their files: `python scripts/benchmarks/table.py --write` renews them"
        )
    for page, text in changed.items():
        write_text(page, text)
        print(f"{display_path(page)}: renewed")


def renewed_pages(root: Path) -> dict[Path, str]:
    """Each page of a checkout with its figures as their files have them; raises UsageError for a figure that a file lacks."""
    pages = {}
    for page in (page for pattern in PAGES for page in sorted(root.glob(pattern))):
        text = page.read_text()
        if page.suffix == ".yaml":
            pages[page] = renewed_header(text, root)
            continue
        files = json_files([str(root / "results")])
        text = TABLE.sub(
            lambda match: f"{match[1]}\n{results_text(files, page.parent, match[2] is None)}\n\n{match[3]}", text
        )
        pages[page] = FIGURE.sub(lambda match: figure_link(match, page), text)
    return pages


def figure_link(match: re.Match[str], page: Path) -> str:
    """What stands in a page in place of a figure."""
    target, label = match["file"] or match["absent"], match["label"] or match["title"]
    file = page.parent / target
    if not file.exists():
        return f'{UNMEASURED}<!-- {target} "{label}" -->'
    texts = figure_texts(read_figures(file))
    if label not in texts:
        raise UsageError(f"{display_path(page)}: {target} has no figure {label!r}; it has {', '.join(texts)}")
    return f'[{texts[label]}]({target} "{label}")'


def renewed_header(text: str, root: Path) -> str:
    """A recipe with its score, time, hardware and date as in the file that its header names, if it names one."""
    named = re.search(r"^# File: +(\S+)$", text, re.MULTILINE)
    if not named:
        return text
    fields = dict.fromkeys(("Time", "Hardware", "Date"), "not measured") | {"Score": UNMEASURED}
    if (root / named[1]).exists():
        name = re.findall(r"\w+", text)[0]
        fields = header_fields(name, read_figures(root / named[1]))
    for field, value in fields.items():
        text = re.sub(rf"^# {field}: .*$", f"# {field}:".ljust(12) + value, text, count=1, flags=re.MULTILINE)
    return text


# ---- from a file to texts


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


def read_figures(file: Path) -> dict[str, Any]:
    """What a file holds; raises UsageError where that is neither a measurement nor a run's metrics."""
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError):
        raise UsageError(f"{display_path(file)} cannot be read as JSON") from None
    if not isinstance(figures, dict) or not ("bench" in figures or "test" in figures):
        raise UsageError(f"{display_path(file)} holds neither a measurement nor a run's metrics")
    return figures


def figure_texts(figures: Mapping[str, Any]) -> dict[str, str]:
    """Each figure of a file by its label: of recipes such as `laptop: training`, of others as in their tables."""
    where = figures.get("environment") or {}
    texts = {"date": where["date"], "machine": machine_text(where)} if where else {}
    if figures.get("bench") == "recipe":
        entries = {name: texts_of(entry["runs"]) for name, entry in figures["recipes"].items()}
        return texts | {f"{name}: {label}": text for name, entry in entries.items() for label, text in entry.items()}
    if "bench" in figures:
        texts |= {
            label: spread_text(value, figures["unit"].get(label, "")) for label, value in figures["headline"].items()
        }
        return texts | {name: value for name, value in figures.items() if isinstance(value, str)}
    return _run_texts(figures)


def _run_texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The same of a run's metrics.json."""
    test, seconds = metrics["test"] or {}, metrics["train_seconds"]
    views = test.get("tta")
    return {
        "test accuracy": mean_text([test["accuracy"]]) if test else "–",
        "with views": f"{mean_text([views['accuracy']])}, {views['views']}" if views else "–",
        "training": f"{spread_text(seconds, 's')} (n = 1)" if seconds is not None else "–",
    }


def header_fields(name: str, figures: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a recipe's header; behind a semicolon is what the list of recipes leaves out."""
    if figures.get("bench") == "recipe":
        runs, where = figures["recipes"][name]["runs"], figures["environment"]
        texts, first = texts_of(runs), runs[0]
        machine, date = machine_text(where, first["accelerator"]), where["date"]
    else:
        texts, first = _run_texts(figures), figures
        machine, date = f"{figures['devices']} × {figures['accelerator']}", "not recorded"
    score, _, interval = texts["test accuracy"].removesuffix(")").partition("; ")
    further = [f"95 % of the mean {interval}"] if interval else []
    further += [f"with views {texts['with views']}"] if texts["with views"] != "–" else []
    cold = texts.get("start to end", "–")
    return {
        "Score": "; ".join([f"{score})", ", ".join([first["dataset"], *further])]),
        "Time": texts["training"]
        + (f"; {cold} from the start of the process to the tested net" if cold != "–" else ""),
        "Hardware": f"{machine}, {first['precision']}",
        "Date": date,
    }


# ---- tables


def results_text(files: Sequence[Path], home: Path, measurements: bool = True) -> str:
    """Markdown of the results in JSON files: a table of recipes, what its columns mean, and a table of other `measurements`.

    home: the folder that links to the files start from. Raises UsageError for a file that holds something else.
    """
    runs: list[Row] = []
    others: list[Row] = []
    for file in files:
        figures = read_figures(file)
        link = f"[{file.stem}]({os.path.relpath(file.absolute(), home).replace(os.sep, '/')})"
        if figures.get("bench") == "recipe":
            runs += [_recipe_row(name, entry, figures, link) for name, entry in figures["recipes"].items()]
        elif "bench" in figures:
            others += [[*row, link] for row in _measurement_rows(figures)]
        else:
            columns = [_run_texts(figures).get(column, "–") for column in RUN_COLUMNS]
            machine = f"{figures['devices']} × {figures['accelerator']}"
            runs.append([f"`{figures['recipe']}`", figures["dataset"], machine, *columns, link])
    parts: list[str] = []
    if runs:
        legend = "\n".join(f"- {line}" for line in LEGEND)
        parts += [markdown(("recipe", "images", "machine", *RUN_COLUMNS, "file"), runs), legend]
    if others and measurements:
        parts.append(markdown(OTHER_COLUMNS, others))
    return "\n\n".join(parts)


def markdown(columns: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; columns without an entry in any row are left out."""
    rows = list(rows)
    kept = [place for place in range(len(columns)) if any(row[place] not in ("", "–") for row in rows)]
    lines = [[columns[place] for place in kept], ["---"] * len(kept)]
    lines += [[row[place].replace("|", "\\|") for place in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _recipe_row(name: str, entry: Mapping[str, Any], figures: Mapping[str, Any], link: str) -> Row:
    first, texts = entry["runs"][0], texts_of(entry["runs"])
    machine = f"{machine_text(figures['environment'], first['accelerator'])}, {first['precision']}"
    title = f"`{name}`" + _overrides(figures["settings"]["flags"])
    return [title, first["dataset"], machine, *(texts[column] for column in RUN_COLUMNS), link]


def _overrides(flags: Sequence[str]) -> str:
    """What was changed on the command line, but for the data set and the device, which have columns of their own."""
    own = ("--data.dataset", "--trainer.devices", "--trainer.accelerator")
    changed = re.findall(r"--\S+(?: (?!--)\S+)?", " ".join(flags))
    kept = [flag for flag in changed if re.split("[= ]", flag)[0] not in own]
    return f" with `{' '.join(kept)}`" if kept else ""


def _measurement_rows(figures: Mapping[str, Any]) -> list[Row]:
    """A row for each of a measurement's headlines: its name, machine, what was measured, the value with its spread."""
    machine = machine_text(figures["environment"], figures.get("accelerator"))
    settings = figures.get("settings", {})
    names = ("net", "recipe", "dataset", "batch_size", "precision")
    subject = " · ".join(f"{name} {settings[name]}" for name in names if settings.get(name))
    command = f"bench {figures['bench']}" if figures["bench"] in BENCHES else figures["bench"]
    name = f"`{command}`" + (f" ({subject.replace('_', ' ')})" if subject else "")
    units = figures["unit"]
    return [
        [name, machine, label, spread_text(value, units.get(label, ""))] for label, value in figures["headline"].items()
    ]


if __name__ == "__main__":
    raise SystemExit(run_script())
