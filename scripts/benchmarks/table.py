"""Write the measured figures of the pages and of the recipe headers from the JSON files in `results/`.

    python scripts/benchmarks/table.py

A page holds figures in generated blocks, from `<!-- results: KEY -->` to `<!-- /results -->`. results/tables.yaml
defines the table of each KEY; the block `machines` explains the names of the processors, which are the same on all
pages. A recipe header names its JSON file in the line `# File:`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from report import FEW, machine_text, spread, spread_text
from variants import differences_of

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path, write_text
from cifar_lit.base.stats import SHARE, limits_text, mean_interval

UNMEASURED = "not measured yet"
KINDS = {"bf16": "CPU with bf16", "cpu": "CPU without", "gpu": "GPU"}  # read by `cifar-lit recipes`
PAGES = ("README*.md", "docs/**/*.md", "results/**/*.md")
RECIPES = "cifar_lit/recipes/*.yaml"
BLOCK = re.compile(
    r"(?P<start><!-- results: (?P<key>[\w-]+) -->\n).*?(?P<end>^<!-- /results -->)", re.DOTALL | re.MULTILINE
)
# In "(n = 20; 91.61 … 91.74)" the interval of a mean, in "(270.9 … 299.8, n = 5)" the quartiles of a median.
INTERVAL = re.compile(r"\((?:[\d.,]+ … [\d.,]+, )?(n = \d+)(?:; [\d.]+ … [\d.]+)?\)")
TIME = re.compile(r"^[\d.,]+ (m?s|[a-z]+/s)\b")
THREADS = re.compile(r"(?P<processor>.+), (?P<count>\d+) threads?")
MACHINES = "machines"  # key of the block with all of them
MARKDOWN_WIDTH = 100


def updated_pages(root: Path) -> dict[Path, str]:
    """Return the text of each page and recipe of a checkout with current figures; raise UsageError for unknown keys."""
    tables = read_tables(root / "results")
    letters = processor_letters(tables, root / "results")
    texts = {}
    for pattern in PAGES:
        for page in sorted(root.glob(pattern)):
            texts[page] = updated_page(page, tables, letters, root / "results")
    for recipe in sorted(root.glob(RECIPES)):
        texts[recipe] = updated_header(recipe.read_text(encoding="utf-8"), root)
    return texts


def updated_page(page: Path, tables: Mapping[str, Table], letters: Mapping[str, str], results: Path) -> str:
    """Return the text of a page with current blocks."""

    def block(match: re.Match[str]) -> str:
        key = match["key"]
        if key == MACHINES:
            text = markdown(("letter", "processor"), [(letter, processor) for processor, letter in letters.items()])
        elif key in tables:
            text = table_text(tables[key], letters, results, page.parent)
        else:
            raise UsageError(f"{display_path(page)}: no table is called {key!r}; use {', '.join(tables)}")
        return f"{match['start']}\n{text}\n\n{match['end']}"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


# ---- tables of the pages


class Figure(NamedTuple):
    """A measured figure: the JSON file in `results/`, without its ending, and the figure's label in it."""

    file: str
    label: str


@dataclass
class Table:
    """A table of a page. A cell is a list of texts and figures, which are joined."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Sequence[str | Figure]]]
    source: str = "Measured on {machines}; {dates}. Source: {link}."
    unmeasured: str = UNMEASURED
    intervals: bool = False

    def files(self) -> list[str]:
        """Return the files of the figures, in the table's order."""
        figures = [part for row in self.rows for cell in row for part in cell if isinstance(part, Figure)]
        return list(dict.fromkeys(figure.file for figure in figures))


def read_tables(results: Path) -> dict[str, Table]:
    """Return the tables of `tables.yaml` by key. The comment at the start of the file describes its format."""
    tables = {}
    for key, entry in yaml.safe_load((results / "tables.yaml").read_text(encoding="utf-8")).items():
        shared = {"file": entry.pop("file", ""), "cells": entry.pop("cells", ()), "rows": entry.pop("rows", ())}
        rows = []
        for part in entry.pop("parts", [{}]):
            rows += rows_of_part(**{**shared, **part})
        tables[key] = Table(rows=rows, **entry)
    return tables


def rows_of_part(
    file: str, cells: Sequence[str], rows: Mapping[str, str] | Sequence[Sequence[str]]
) -> list[list[list[str | Figure]]]:
    """Return a row for each entry of `rows`, with its fields inserted into `cells` and `file`."""
    entries = rows.items() if isinstance(rows, Mapping) else rows
    return [[parts_of_cell(cell.format(*fields), file.format(*fields)) for cell in cells] for fields in entries]


def parts_of_cell(cell: str, file: str) -> list[str | Figure]:
    """Split the text of a cell at its figures, which are in `file` unless they name another one."""
    parts: list[str | Figure] = []
    for number, text in enumerate(re.split("<([^>]+)>", cell)):
        if number % 2 == 0:
            parts.append(text)
            continue
        own_file, _, label = text.rpartition(" | ")
        name = own_file or file
        parts.append(Figure(name if "/" in name else f"cpu/{name}", label))
    return parts


def processor_letters(tables: Mapping[str, Table], results: Path) -> dict[str, str]:
    """Return the letter of each processor, in the order in which the tables name them."""
    files = dict.fromkeys(name for table in tables.values() for name in table.files())
    paths = [results / f"{name}.json" for name in files]
    measured = [read_figures(path) for path in paths if path.exists()]
    processors = dict.fromkeys(_processor(figures)[0] for figures in measured if "environment" in figures)
    return {processor: chr(ord("A") + place) for place, processor in enumerate(processors)}


def _processor(figures: Mapping[str, Any]) -> tuple[str, str]:
    """Return a CPU and its number of threads, or a GPU and nothing."""
    machine = _machine(figures)
    match = THREADS.fullmatch(machine)
    return (match["processor"], match["count"]) if match else (machine, "")


def table_text(table: Table, letters: Mapping[str, str], results: Path, home: Path) -> str:
    """Return a table with its source as Markdown.

    Args:
        letters: letter of each processor. With the number of threads behind it, it names a machine: A2.
        results: the folder of JSON files.
        home: the folder that links start from.
    """
    paths = {name: results / f"{name}.json" for name in table.files()}
    files = {name: read_figures(path) for name, path in paths.items() if path.exists()}
    machines = {}
    for name, figures in files.items():
        if "environment" in figures:
            processor, threads = _processor(figures)
            machines[name] = letters[processor] + threads
    names = sorted(set(machines.values()))

    def text(part: str | Figure) -> str:
        if isinstance(part, str):
            return part
        if part.file not in files:
            return table.unmeasured
        figures = files[part.file]
        texts = figure_texts(figures)
        if part.label not in texts:
            path = display_path(paths[part.file])
            raise UsageError(f"{path} has no figure {part.label!r}; it has {', '.join(texts)}")
        value = texts[part.label] if table.intervals else short(texts[part.label])
        if len(names) == 1 or part.file not in machines or not TIME.search(value):
            return value
        mark = machines[part.file]
        return f"{value[:-1]}; {mark})" if value.endswith(")") else f"{value} ({mark})"

    rows = [["".join(map(text, cell)) for cell in row] for row in table.rows]
    source = _source(table.source, files, names, results, home)
    return "\n\n".join([markdown(table.columns, rows), *([source] if source else [])])


def _source(
    template: str, files: Mapping[str, Mapping[str, Any]], machines: Sequence[str], results: Path, home: Path
) -> str:
    """Return machines, dates and one link: to the JSON file, or for several files to the index of `results/`."""
    dates = sorted({figures["environment"]["date"] for figures in files.values() if "environment" in figures})
    if not dates:
        return ""
    target = results / (f"{next(iter(files))}.json" if len(files) == 1 else "README.md")
    legend = _link(results.parent / "docs" / "method.md", home)
    return textwrap.fill(
        template.format(
            machines=f"[{', '.join(machines)}]({legend}#machines)",
            dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
            link=f"[{target.name if len(files) == 1 else 'results/'}]({_link(target, home)})",
        ),
        MARKDOWN_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---- headers of recipes


def updated_header(text: str, root: Path) -> str:
    """Return a recipe with current score, times, hardware and date, if its header names JSON files.

    The first file has all of these, further ones only the time on a kind of machine. Times by units.py take precedence,
    because those of different machines and days cannot be compared.
    """
    files = [root / file for file in re.findall(r"^# File: +(\S+)$", text, re.MULTILINE)]
    if not files:
        return text
    name = re.findall(r"\w+", text)[0]
    fields = dict.fromkeys(("Score", "Time", "Hardware", "Date"), UNMEASURED)
    measured = [read_figures(file) for file in files if file.exists()]
    if files[0].exists():
        fields = header_fields(name, measured[0])
    in_units = [figures for figures in measured if figures.get("bench") == "units"]
    if in_units:
        texts = {label: short(text) for label, text in figure_texts(in_units[0]).items()}
        fields["Time"] = f"{texts[f'{name}: typical training']}; {texts[f'{name}: units']} the tutorial's ten epochs"
        fields["Hardware"] = f"{_machine(in_units[0])}, {in_units[0]['settings']['precision']}"
    times = dict(kind_and_time(name, figures) for figures in measured)
    fields["Times"] = "; ".join(f"{time} on a {KINDS[kind]}" for kind, time in times.items()) or UNMEASURED
    for field, value in fields.items():
        text = re.sub(rf"^# {field}: .*$", f"# {field}:".ljust(12) + value, text, count=1, flags=re.MULTILINE)
    return text


# ---- from a JSON file to texts


def read_figures(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; raise UsageError if it is neither a measurement nor the metrics of a run."""
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{display_path(file)} is not valid JSON") from None
    if not isinstance(figures, dict) or not ("bench" in figures or "test" in figures):
        raise UsageError(f"{display_path(file)} holds neither a measurement nor the metrics of a run")
    return figures


def short(text: str) -> str:
    """Return a figure without its interval or quartiles: `91.67 ± 0.14 % (n = 20)`."""
    return INTERVAL.sub(r"(\1)", text)


def figure_texts(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return all figures of a file by label. Labels of recipes begin with the name: `cpu91: training`."""
    if figures.get("bench") == "recipe":
        entries = {name: texts_of(entry["runs"]) for name, entry in figures["recipes"].items()}
        return {f"{name}: {label}": text for name, texts in entries.items() for label, text in texts.items()}
    if "bench" in figures:
        units = figures["unit"]
        if figures["bench"] == "variants" and "runs" in figures:
            return variant_texts(figures["runs"])
        return {label: spread_text(value, units.get(label, "")) for label, value in figures["headline"].items()}
    return _run_texts(figures)


def texts_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the results of a recipe's runs by column, – for missing values.

    The accuracy is over all runs. If there are several runs, times leave out the first run in each process, which loads
    code and compiles or captures kernels, and runs beside other work, which are recorded without a time.
    """
    warm = [run for run in runs if not run["first"]] or runs
    times = [run["seconds"] for run in warm if run["seconds"]]
    views = [run["views"] for run in runs if run["views"]]
    # Only files of earlier versions have a time from the start of the process, and the memory.
    cold = [run["cold_seconds"] for run in runs if run.get("cold_seconds") is not None]
    memory, device = (max(run.get(name) or 0 for run in runs) for name in ("memory_mb", "device_memory_mb"))
    peak = f"{memory:,} MB" if memory else "–"
    if device:
        peak += f" + {device:,} MB on the device"
    return {
        "test accuracy": mean_text([run["accuracy"] for run in runs]),
        "with TTA": f"{mean_text([one['accuracy'] for one in views])}, {views[0]['views']}" if views else "–",
        "training time": spread_text(spread(times), "s"),
        "start to result": spread_text(spread(cold), "s") if cold else "–",
        "peak memory": peak,
        **calibration_texts([run["calibration"] for run in runs if run.get("calibration")]),
    }


def calibration_texts(shown: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the calibration error of runs as they are used, beside that of a perfectly calibrated net.

    Earlier files have none.
    """
    if not shown:
        return {}
    kind = "" if shown[0]["tempered_error"] is None else "tempered_"
    error = mean_interval([one[f"{kind}error"] for one in shown])
    deviation = "" if error["std"] is None else f" ± {error['std']:.4f}"
    return {
        "temperature": f"{statistics.mean(one['temperature'] or 1 for one in shown):.3g}",
        "calibration error": f"{error['mean']:.4f}{deviation} (n = {error['n']})",
        "without temperature": f"{statistics.mean(one['error'] for one in shown):.4f}",
        "of a perfect net": f"{statistics.mean(one[f'{kind}perfect']['mean'] for one in shown):.4f}",
    }


def variant_texts(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return the mean held-out accuracy of each variant, and its mean difference to the unchanged recipe, by seed."""
    texts = {}
    for name, same in runs.items():
        texts[f"{name}: held-out accuracy"] = mean_text([run["accuracy"] for run in same])
        mean = mean_interval(differences_of(runs, name))
        limits = limits_text(mean, "+.2f", 0.01)
        texts[f"{name}: difference"] = (
            f"{100 * mean['mean']:+.2f} points (n = {mean['n']}{'; ' if limits else ''}{limits})"
        )
    return texts


def mean_text(fractions: Sequence[float]) -> str:
    """Return the mean with standard deviation, n and interval: `91.69 ± 0.17 % (n = 20; 91.61 … 91.77)`."""
    mean = mean_interval(fractions, SHARE)
    deviation = "" if mean["std"] is None else f" ± {100 * mean['std']:.2f}"
    limits = limits_text(mean, ".2f", 0.01) if mean["n"] >= FEW else ""
    interval = f"; {limits}" if limits else ""
    return f"{100 * mean['mean']:.2f}{deviation} % (n = {mean['n']}{interval})"


def _run_texts(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a run's metrics.json by label."""
    test, seconds = metrics["test"] or {}, metrics["train_seconds"]
    tta = test.get("tta")
    return {
        "test accuracy": mean_text([test["accuracy"]]) if test else "–",
        "with TTA": f"{mean_text([tta['accuracy']])}, {tta['views']}" if tta else "–",
        "training time": f"{spread_text(seconds, 's')} (n = 1)" if seconds is not None else "–",
    }


def header_fields(name: str, figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a recipe header. `cifar-lit recipes` shows what stands before the semicolons."""
    if figures.get("bench") == "recipe":
        runs = figures["recipes"][name]["runs"]
        texts, first, date = texts_of(runs), runs[0], figures["environment"]["date"]
    else:
        texts, first, date = _run_texts(figures), figures, "not recorded"
    texts = {label: short(text) for label, text in texts.items()}
    score = f"{texts['test accuracy']}; {first['dataset']}"
    if texts["with TTA"] != "–":
        score += f", with TTA {texts['with TTA']}"
    time = texts["training time"]
    if texts.get("start to result", "–") != "–":
        time += f"; {texts['start to result']} from process start to result"
    return {"Score": score, "Time": time, "Hardware": f"{_machine(figures)}, {first['precision']}", "Date": date}


def kind_and_time(name: str, figures: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of machine and the training time of a recipe, as `cifar-lit recipes` reads it."""
    if figures.get("bench") == "units":
        first = {"accelerator": "cpu", "precision": figures["settings"]["precision"]}
        time = figure_texts(figures)[f"{name}: typical training"]
    elif figures.get("bench") == "recipe":
        runs = figures["recipes"][name]["runs"]
        first, time = runs[0], texts_of(runs)["training time"]
    else:
        first, time = dict(figures), _run_texts(figures)["training time"]
    kind = "gpu"
    if first["accelerator"] == "cpu":
        kind = "bf16" if "bf16" in first["precision"] else "cpu"
    return kind, time.partition(" (")[0]


def _machine(figures: Mapping[str, Any]) -> str:
    """Return the CPU or GPU that was used, as exactly as it was recorded."""
    if "environment" not in figures:  # metrics.json of a run
        return f"{figures['devices']} × {figures['accelerator']}"
    runs = [run for entry in figures.get("recipes", {}).values() for run in entry["runs"]]
    text = machine_text(figures["environment"], (runs[0] if runs else figures).get("accelerator"))
    # Older records have no model. Of AMD's processors, those from Zen 4 on have AVX512-BF16.
    model = "Zen 4 or newer" if "AMD EPYC with bf16" in text else "model not recorded"
    return re.sub(r"^AMD EPYC(?= with|,)", f"AMD EPYC ({model})", text)


# ---- Markdown


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without its empty columns."""
    rows = list(rows)
    filled = [place for place in range(len(columns)) if any(row[place] not in ("", "–") for row in rows)]
    lines = [[columns[place] for place in filled], ["---"] * len(filled)]
    lines += [[row[place].replace("|", "\\|") for place in filled] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _link(target: Path, home: Path) -> str:
    return os.path.relpath(target, home).replace(os.sep, "/")


if __name__ == "__main__":
    for changed, text in updated_pages(Path.cwd()).items():
        if text != changed.read_text(encoding="utf-8"):
            write_text(changed, text)
            print(f"{display_path(changed)}: updated")
