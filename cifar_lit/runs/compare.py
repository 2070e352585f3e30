"""Compare runs: settings that differ, results, and statistical tests of the differences."""

from __future__ import annotations

import glob
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_lit.data.formats import TABLES
from cifar_lit.data.table import read_table
from cifar_lit.errors import UsageError
from cifar_lit.files import file_size
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import GROUP, LOCK, changes_text, display_path, read_curves, read_metrics, read_rows
from cifar_lit.stats import SHARE, McNemar, mcnemar, mean_interval, wilson_interval
from cifar_lit.text import csv_cell, natural_key, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

SEED = "seed_everything"
PLACES = ("logs", "ckpt_path", "weights_only")  # settings about files, ignored in the comparison
MAX_LABELS = 4 << 20  # bytes of a table of labels whose changes are counted
MAX_COLUMNS = 20  # columns of groups
RUN_FILES = ("config.yaml", "metrics.json", "metrics.csv", LOCK)

# ---- Read runs.


@dataclass(frozen=True)
class RunRecord:
    """A run folder as the comparison sees it."""

    path: Path
    name: str  # path relative to the working folder
    settings: dict[str, object] = field(default_factory=dict)  # config.yaml by dotted name, without `PLACES`
    metrics: dict[str, Any] = field(default_factory=dict)  # metrics.json
    note: str = ""  # why results are missing, and settings that changed when it was resumed

    @property
    def test(self) -> dict[str, Any]:
        """The test results in metrics.json; empty without a test."""
        test = self.metrics.get("test")
        if isinstance(test, dict) and isinstance(test.get("accuracy"), int | float):
            return test
        return {}

    @property
    def recipe(self) -> str:
        """Name of the recipe, or –."""
        return str(self.metrics.get("recipe") or self.settings.get("recipe") or "–")

    @property
    def seed(self) -> object:
        """The seed; None if it is unknown or the run has none (`seed_everything: false`)."""
        seed: object = self.settings.get(SEED, self.metrics.get("seed"))
        if seed is False:
            return None
        return seed

    @property
    def figures(self) -> dict[str, Any]:
        """The values to compare by name (None if unknown), then all other scores on the test and validation images.

        `low` and `high` are the limits of the 95 % interval of the test accuracy.
        """
        test, val = self.test, self.metrics.get("val") or {}
        figures = {"accuracy": test.get("accuracy"), "low": None, "high": None, "loss": test.get("loss")}
        if images := test.get("images"):
            figures["low"], figures["high"] = wilson_interval(round(test["accuracy"] * images), images)
        figures["val_accuracy"] = val.get("accuracy")
        for name in ("train_seconds", "images_per_second", "parameters", "epochs"):
            figures[name] = self.metrics.get(name)
        for prefix, scores in (("", test), ("val_", val)):
            for name, value in scores.items():
                if name not in ("accuracy", "loss", "images") and isinstance(value, int | float):
                    figures[prefix + name] = value
        return figures


def find_runs(names: Sequence[str]) -> list[Path]:
    """Return the run folders selected by `names`, without repetitions.

    A name is a run folder, a folder of runs, or a pattern such as `logs/cpu91-*`. A folder without any run is returned
    as it is, and `read_run` reports that it is broken. Raise UsageError for a name that matches no folder.
    """
    runs: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        matches = [path]
        if not path.exists():
            matches = [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207
        if not matches:
            raise UsageError(f"there is no {name}: name run folders, a pattern of them, or a folder of logs")
        folders = _sorted_folders(matches)
        if not folders:
            raise UsageError(f"{name} is a file: name run folders, a pattern of them, or a folder of logs")
        for folder in folders:
            for run in _runs_in(folder) or [folder]:
                runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder; none if it is a run itself or cannot be read, which `read_run` reports."""
    try:
        if _is_run(folder):
            return []
        return [inner for inner in _sorted_folders(folder.iterdir()) if _is_run(inner)]
    except OSError:
        return []


def _sorted_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders among paths, cpu91-2 before cpu91-10."""
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=lambda folder: natural_key(folder.name))


def _is_run(path: Path) -> bool:
    try:
        return any((path / name).is_file() for name in RUN_FILES)
    except OSError:
        return True


def read_run(path: Path) -> RunRecord:
    """Return the contents of a run folder. Missing and damaged files are reported in `note`, never raised."""
    try:
        return _read_run(path)
    except OSError as error:
        return RunRecord(path, display_path(path), {}, {}, f"cannot be read ({error.strerror or error})")


def _read_run(path: Path) -> RunRecord:
    settings: dict[str, Any] = {}
    config = path / "config.yaml"
    with suppress(UsageError):  # it is damaged
        if config.is_file():  # reading a pipe would block
            settings = _flattened(plain_values(config))
    for name in PLACES:
        settings.pop(name, None)
    record = RunRecord(path, display_path(path), settings, read_metrics(path))
    notes = [_note(record), changes_text(record.metrics)]
    return replace(record, note="; ".join(filter(None, notes)))


def _note(run: RunRecord) -> str:
    if run.metrics:
        if not run.settings:
            return "its config.yaml is missing or damaged"
        if not run.test:
            return "no test"
        return ""
    if (run.path / "metrics.json").exists():
        return "damaged: metrics.json cannot be read"
    if (run.path / "folds.json").is_file():
        return "a cross-validation: compare its runs"
    if (run.path / "predictions.csv").is_file():
        return "predictions only"
    if not run.settings:
        return "broken: neither config.yaml nor metrics.json"
    if (run.path / LOCK).exists():  # a killed process leaves it
        return "still running, or killed"
    return "did not end"


def _flattened(settings: object, prefix: str = "") -> dict[str, object]:
    """Return nested settings by dotted name; empty if they are no mapping. Lists and empty mappings are values."""
    if not isinstance(settings, Mapping):
        return {}
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= _flattened(value, f"{prefix}{name}.") or {f"{prefix}{name}": value}
    return flat


# ---- Settings, groups and pairs.


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value in each run as text, – for a missing value.

    Runs without any settings are not compared.
    """
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.settings)
    texts = {}
    for name in names:
        if len({_setting_text(run, name) for run in runs if run.settings}) > 1:
            texts[name] = [_setting_text(run, name) for run in runs]
    return texts


def _setting_text(run: RunRecord, name: str) -> str:
    """Return the value of a setting as text, strings without quotes and other values as JSON."""
    value = run.settings.get(name, "–")
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def groups(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Group the tested runs that have the same recipe, data and settings, except for the seed and the threads.

    Returns:
        For each group: `recipe`, `settings` (as text, those that differ between groups), `runs` (names), `seeds` and
        `accuracies` of the runs, and `mean_interval` of `accuracy` and `train_seconds` over the first run of each seed.
        If the data of equal settings differ, such as a folder that was changed, `settings` has a number of the data as
        `data`.
    """
    tested = [run for run in runs if run.test]
    names = [name for name in differing(tested) if name not in (SEED, "recipe", "threads")]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in tested:
        key = (run.recipe, *(_setting_text(run, name) for name in names))
        members.setdefault(key, []).append(run)
    if any(len({_data_text(run) for run in group} - {""}) > 1 for group in members.values()):
        names.append("data")
        members = _split_by_data(members, tested)
    return [_summary(names, key, group) for key, group in members.items()]


def _split_by_data(
    members: Mapping[tuple[str, ...], Sequence[RunRecord]], runs: Sequence[RunRecord]
) -> dict[tuple[str, ...], list[RunRecord]]:
    """Add a number of the data to the keys, in the order of their first use in `runs`, – for unknown data."""
    numbers = {"": "–"}
    for run in runs:
        numbers.setdefault(_data_text(run), str(len(numbers)))
    split: dict[tuple[str, ...], list[RunRecord]] = {}
    for key, group in members.items():
        for run in group:
            split.setdefault((*key, numbers[_data_text(run)]), []).append(run)
    return split


def _summary(names: Sequence[str], key: Sequence[str], group: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the entry of a group in the result of `groups`. key: its recipe, then its settings."""
    # Runs that repeat a seed say nothing about the spread over seeds. Runs without a seed are independent.
    firsts: dict[str, RunRecord] = {}
    for run in group:
        if run.seed is None:
            firsts[run.name] = run
        else:
            firsts.setdefault(str(run.seed), run)
    accuracies = [run.test["accuracy"] for run in firsts.values()]
    seconds = [run.metrics["train_seconds"] for run in firsts.values() if run.metrics.get("train_seconds")]
    return {
        "recipe": key[0],
        "settings": dict(zip(names, key[1:], strict=True)),
        "runs": [run.name for run in group],
        "seeds": [run.seed for run in group],
        "accuracies": [run.test["accuracy"] for run in group],
        "accuracy": mean_interval(accuracies, SHARE),
        "train_seconds": mean_interval(seconds) if seconds else None,
    }


@dataclass(frozen=True)
class Hits:
    """Whether each test image was predicted correctly, and the fingerprint of these images."""

    fingerprint: str
    correct: list[bool]
    columns: dict[str, list[str]] = field(default_factory=dict)  # groups of each image by column, see `data.groups`


def hits_by_run(runs: Sequence[RunRecord]) -> dict[str, Hits]:
    """Return the hits by name of each run with complete predictions."""
    found = {}
    for run in runs:
        fingerprint = run.test.get("fingerprint")
        if fingerprint and (hits := _hits(run, fingerprint)):
            found[run.name] = hits
    return found


def _hits(run: RunRecord, fingerprint: str) -> Hits | None:
    """Return the hits of a run; None if predictions.csv lacks a test image."""
    names = run.test.get("groups")
    if not isinstance(names, dict):
        names = {}
    columns = {name: f"{GROUP}{csv_cell(name)}" for name in [*names][:MAX_COLUMNS]}
    try:
        table = read_rows(run.path / "predictions.csv", ("index", "label", "predicted", *columns.values()))
        rows = sorted(table, key=lambda row: int(row["index"]))
        indices = [int(row["index"]) for row in rows]
        correct = [row["label"] == row["predicted"] for row in rows]
    except (KeyError, ValueError):
        return None
    if len(rows) != run.test.get("images") or indices != [*range(len(rows))]:
        return None
    written = {column for row in rows for column in row}
    values = {name: [row.get(c, "") for row in rows] for name, c in columns.items() if c in written}
    return Hits(fingerprint, correct, values)


def pairs(runs: Sequence[RunRecord], hits: Mapping[str, Hits]) -> tuple[list[tuple[str, str, McNemar]], list[str]]:
    """Apply McNemar's test to pairs of runs that were tested on the same images.

    Up to five runs on the same images are compared pairwise. With more, each is compared with the most accurate one.

    Returns:
        The names of each pair with its test, and messages about runs that are not compared.
    """
    tested = [run for run in runs if run.test]
    if len(tested) < 2:
        return [], []
    messages = []
    missing = ", ".join(run.name for run in tested if run.name not in hits)
    if missing:
        messages.append(f"not compared image by image, because predictions.csv is missing or incomplete: {missing}")
    by_images: dict[str, list[RunRecord]] = {}
    for run in tested:
        if run.name in hits:
            by_images.setdefault(run.test["fingerprint"], []).append(run)
    if len(by_images) > 1:
        messages.append("runs with different test images are not compared image by image")
    candidates: list[tuple[RunRecord, RunRecord]] = []
    for group in by_images.values():
        if len(group) <= 5:
            candidates += combinations(group, 2)
            continue
        best = max(group, key=lambda run: run.test["accuracy"])
        candidates += [(best, run) for run in group if run is not best]
        messages.append(f"{best.name} was selected as the best on these images, so its p values are slightly too small")
    tests = []
    for first, second in candidates:
        counts = Counter(zip(hits[first.name].correct, hits[second.name].correct, strict=False))
        tests.append((first.name, second.name, mcnemar(counts[True, False], counts[False, True])))
    return tests, messages


def group_tests(
    columns: Mapping[str, Sequence[str]], first: Sequence[bool], second: Sequence[bool]
) -> dict[str, McNemar]:
    """Apply McNemar's test to the images of each group, by column and value.

    columns: value of each image by column. first, second: whether each image is correct in either run.
    """
    tests = {}
    for column, values in columns.items():
        counts: dict[str, Counter[tuple[bool, bool]]] = {}
        for value, *pair in zip(values, first, second, strict=False):
            counts.setdefault(value, Counter())[pair[0], pair[1]] += 1
        for value, of_group in counts.items():
            tests[f"{column} {value or 'without a value'}"] = mcnemar(of_group[True, False], of_group[False, True])
    return tests


# ---- Data.


def data_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line about each further data set that runs used, compared with that of the first run."""
    by_data: dict[str, RunRecord] = {}
    for run in runs:
        if data := _data_text(run):
            by_data.setdefault(data, run)
    lines = []
    different = list(by_data.values())
    for run in different[1:]:
        first = different[0]
        lines.append(f"{first.name} and {run.name} used different data: {_data_difference(first, run)}")
    return lines


def _data_text(run: RunRecord) -> str:
    """Return the `data` entry of metrics.json as text; empty if it is missing."""
    data = run.metrics.get("data")
    if not isinstance(data, dict):
        return ""
    return json.dumps(data, sort_keys=True)


def _data_difference(first: RunRecord, second: RunRecord) -> str:
    """Return what differs. The labels and the split of different images cannot be compared."""
    data, other = first.metrics["data"], second.metrics["data"]
    differ = {name for name in ("images", "labels", "split", "classes") if data.get(name) != other.get(name)}
    counts = f"{data.get('train')} and {other.get('train')} training images"
    texts = []
    if "images" in differ:
        texts.append(f"images ({counts})")
    else:
        if "labels" in differ:
            texts.append(_changed_labels(first, second))
        if "split" in differ:
            texts.append(f"split ({counts})")
        if "classes" in differ:
            texts.append("classes")
    tests = {run.test["fingerprint"] for run in (first, second) if run.test.get("fingerprint")}
    if len(tests) > 1:
        texts.append("test set")
    return ", ".join(texts)


def _changed_labels(first: RunRecord, second: RunRecord) -> str:
    """Return `labels`, with the number of images that have other labels if the tables of both runs tell it."""
    try:
        table, other = _labels(first), _labels(second)
    except (UsageError, OSError):
        return "labels"
    changed = 0
    for path, label in table.items():
        if other.get(path, label) != label:
            changed += 1
    if not changed:
        return "labels"
    return f"labels of {changed} images"


def _labels(run: RunRecord) -> dict[Path, str]:
    """Return the labels in the table of a run; empty without one. Raise UsageError or OSError for an invalid table."""
    root = Path(str(run.settings.get("data.root"))).expanduser()
    if root.suffix.lower() not in TABLES or not root.is_file():
        return {}
    file_size(root, MAX_LABELS)  # a file that the configuration of someone else may name
    return {root.absolute().parent / row.path: row.label for row in read_table(root)}


# ---- Plot the curves.

# Okabe and Ito's palette for all colour vision, without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
STYLES = ("-", "--", ":", "-.")  # line styles; each is used with all colours before the next
SIDE, ROW = 4.6, 3.1  # inches of one panel


@dataclass(frozen=True)
class Curves:
    """The curves of a run."""

    rows: list[dict[str, float]]  # rows of metrics.csv, with an `epoch` each
    label: str  # the run's name or that of its group, which all of its runs share
    seconds: float  # mean time of an epoch; 0 if unknown

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """Return the epochs completed at each row that has a value, and the values."""
        ends = {row["epoch"]: row.get("step", 0.0) for row in self.rows}
        epochs, values = [], []
        for row in self.rows:
            if column in row:
                begin, end = ends.get(row["epoch"] - 1, 0.0), ends[row["epoch"]]
                epochs.append(row["epoch"] + (row.get("step", end) - begin) / max(end - begin, 1.0))
                values.append(row[column])
        return epochs, values


def _curves_of(run: RunRecord, label: str) -> Curves:
    rows = [row for row in read_curves(run.path) if "epoch" in row]
    return Curves(rows, label, (run.metrics.get("train_seconds") or 0) / (run.metrics.get("epochs") or 1))


def plot_curves(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    """Draw accuracy and training loss over epochs, and over seconds if the training time is known, as a PNG.

    The accuracy is the validation accuracy, or the training accuracy if no run validates. Runs with the same label have
    the same colour. The user's matplotlibrc is ignored: it could select TeX. Raise ValueError if no run has a curve.
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    curves = [_curves_of(run, label) for run, label in zip(runs, labels, strict=True)]
    if any(curve.points("val/accuracy")[0] for curve in curves):
        accuracy, title = "val/accuracy", "validation accuracy"
    elif any(curve.points("train/accuracy")[0] for curve in curves):
        accuracy, title = "train/accuracy", "training accuracy"
    else:
        raise ValueError("none of these runs has a curve yet")
    appearance = dict(zip(dict.fromkeys(labels), cycle(product(STYLES, COLOURS)), strict=False))
    panels = 1
    if any(curve.seconds for curve in curves):
        panels = 2
    columns = min(len(appearance), 1 + panels)
    legend_rows = math.ceil(len(appearance) / columns)
    with style.context("default"):
        size = (SIDE * panels, 2 * ROW + 0.22 * legend_rows + 0.2)
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        grid = figure.subplots(2, panels, sharex="col", sharey="row", squeeze=False)
        lines: dict[str, Line2D] = {}
        for curve in curves:
            lines |= _draw_curve(grid[0], curve, accuracy, appearance[curve.label])
            lines |= _draw_curve(grid[1], curve, "train/loss", appearance[curve.label])
        for axes in grid.flat:
            axes.grid(color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.set_xlim(left=0)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid[0]:
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
        grid[0][0].set_ylabel(f"{title}, %")
        grid[1][0].set_ylabel("training loss")
        grid[1][0].set_xlabel("epochs")
        if panels == 2:
            grid[1][1].set_xlabel("training time, s (at each run's mean epoch)")
        names = [printable(label).replace("$", r"\$") for label in lines]  # matplotlib parses formulas between dollars
        figure.legend(list(lines.values()), names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        figure.savefig(file, format="png")


def _draw_curve(row: Sequence[Axes], curve: Curves, column: str, appearance: tuple[str, str]) -> dict[str, Line2D]:
    """Draw a curve over epochs, and in the second panel of the row over seconds if known. Return its line by label.

    appearance: line style and colour.
    """
    epochs, values = curve.points(column)
    if not epochs:
        return {}
    look: dict[str, Any] = {"linestyle": appearance[0], "color": appearance[1], "linewidth": 1.4, "markersize": 4}
    if len(epochs) == 1:
        look["marker"] = "o"
    (line,) = row[0].plot(epochs, values, **look)
    if curve.seconds:
        row[1].plot([curve.seconds * epoch for epoch in epochs], values, **look)
    return {curve.label: line}
