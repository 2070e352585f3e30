"""Compare runs: settings that differ, results, and statistical tests of the differences."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, compress, cycle, product
from pathlib import Path
from typing import Any

from cifar_lit.data.formats import TABLES
from cifar_lit.data.table import read_table
from cifar_lit.errors import UsageError
from cifar_lit.files import file_size
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import LOCK, changes_text, display_path, read_curves, read_metrics, read_rows
from cifar_lit.stats import SHARE, McNemar, mcnemar, mean_interval, wilson_interval
from cifar_lit.text import natural_key, printable

SEED = "seed_everything"
PLACES = ("logs", "ckpt_path", "weights_only")  # settings about files, ignored in the comparison
MAX_LABELS = 4 << 20  # bytes of a table of labels whose changes are counted
RUN_FILES = ("config.yaml", "metrics.json", "metrics.csv", LOCK)

# ---- Read runs.


@dataclass(frozen=True)
class RunRecord:
    """A run folder as the comparison sees it."""

    path: Path
    name: str  # path relative to the working folder
    settings: dict[str, Any] = field(default_factory=dict)  # config.yaml by dotted name, without `PLACES`
    metrics: dict[str, Any] = field(default_factory=dict)  # metrics.json
    note: str = ""  # why results are missing, and settings that changed when it was resumed

    @property
    def test(self) -> dict[str, Any]:
        """The test results in metrics.json; empty without a test."""
        test = self.metrics.get("test")
        return test if isinstance(test, dict) and isinstance(test.get("accuracy"), int | float) else {}

    @property
    def recipe(self) -> str:
        """Name of the recipe, or –."""
        return str(self.metrics.get("recipe") or self.settings.get("recipe") or "–")

    @property
    def seed(self) -> Any:
        """The seed; None if it is unknown or the run has none (`seed_everything: false`)."""
        seed = self.settings.get(SEED, self.metrics.get("seed"))
        return None if seed is False else seed

    @property
    def figures(self) -> dict[str, Any]:
        """The values to compare by name (None if unknown), then all other scores on the test and validation images.

        `low` and `high` are the limits of the 95 % interval of the test accuracy.
        """
        test, val = self.test, self.metrics.get("val") or {}
        images = test.get("images")
        low, high = wilson_interval(round(test["accuracy"] * images), images) if images else (None, None)
        figures = {"accuracy": test.get("accuracy"), "low": low, "high": high, "loss": test.get("loss")}
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

    A name is a run folder, a folder of runs, or a pattern such as `logs/laptop-*`. A folder without any run is returned
    as it is, and `read_run` reports that it is broken. Raise UsageError for a name that matches no folder.
    """
    runs: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207
        folders = _sorted_folders(matches)
        if not folders:
            problem = f"{name} is a file" if matches else f"there is no {name}"
            raise UsageError(f"{problem}: name run folders, a pattern of them, or a folder of logs")
        for folder in folders:
            inner: list[Path] = []
            with suppress(OSError):  # `read_run` reports a folder that cannot be read
                inner = [] if _is_run(folder) else list(filter(_is_run, _sorted_folders(folder.iterdir())))
            for run in inner or [folder]:
                runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _sorted_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders among paths, laptop-2 before laptop-10."""
    return sorted(filter(Path.is_dir, paths), key=lambda folder: natural_key(folder.name))


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
    config_file = path / "config.yaml"
    try:
        config = plain_values(config_file) if config_file.is_file() else None  # reading a pipe would block
    except UsageError:
        config = None
    settings = _flattened(config) if isinstance(config, dict) else {}
    settings = {name: value for name, value in settings.items() if name not in PLACES}
    record = RunRecord(path, display_path(path), settings, read_metrics(path))
    if record.metrics:
        note = "its config.yaml is missing or damaged" if not settings else "" if record.test else "no test"
        note = "; ".join(filter(None, (note, changes_text(record.metrics))))
    elif (path / "metrics.json").exists():
        note = "damaged: metrics.json cannot be read"
    elif (path / "folds.json").is_file():
        note = "a cross-validation: compare its runs"
    elif (path / "predictions.csv").is_file():
        note = "predictions only"
    elif not settings:
        note = "broken: neither config.yaml nor metrics.json"
    else:  # a killed process leaves its lock file
        note = "still running, or killed" if (path / LOCK).exists() else "did not end"
    return replace(record, note=note)


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name. Lists are values."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= _flattened(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


# ---- Settings, groups and pairs.


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value in each run as text, – for a missing value.

    Runs without any settings are not compared.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    texts = {name: [_setting_text(run, name) for run in runs] for name in names}
    has_settings = [bool(run.settings) for run in runs]
    return {name: values for name, values in texts.items() if len(set(compress(values, has_settings))) > 1}


def _setting_text(run: RunRecord, name: str) -> str:
    """Return the value of a setting as text, strings without quotes and other values as JSON."""
    value = run.settings.get(name, "–")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


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
    keys = [(run.recipe, *(_setting_text(run, name) for name in names)) for run in tested]
    data = list(map(_data_text, tested))
    by_data = {pair for pair in zip(keys, data, strict=True) if pair[1]}
    if len(by_data) > len({key for key, _ in by_data}):
        numbers = {text: str(number) for number, text in enumerate(dict.fromkeys(filter(None, data)), 1)}
        names.append("data")
        keys = [(*key, numbers.get(text, "–")) for key, text in zip(keys, data, strict=True)]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for key, run in zip(keys, tested, strict=True):
        members.setdefault(key, []).append(run)
    summaries = []
    for (recipe, *texts), group in members.items():
        # Runs that repeat a seed say nothing about the spread over seeds. Runs without a seed are independent.
        firsts = {str(run.name if run.seed is None else run.seed): run for run in reversed(group)}.values()
        seconds = [run.metrics["train_seconds"] for run in firsts if run.metrics.get("train_seconds")]
        summaries.append(
            {
                "recipe": recipe,
                "settings": dict(zip(names, texts, strict=True)),
                "runs": [run.name for run in group],
                "seeds": [run.seed for run in group],
                "accuracies": [run.test["accuracy"] for run in group],
                "accuracy": mean_interval([run.test["accuracy"] for run in firsts], SHARE),
                "train_seconds": mean_interval(seconds) if seconds else None,
            }
        )
    return summaries


@dataclass(frozen=True)
class Hits:
    """Whether each test image was predicted correctly, and the fingerprint of these images."""

    fingerprint: str
    correct: list[bool]


def hits_by_run(runs: Sequence[RunRecord]) -> dict[str, Hits]:
    """Return the hits by name of each run with complete predictions."""
    tested = [(run, run.test["fingerprint"]) for run in runs if run.test.get("fingerprint")]
    return {run.name: Hits(fingerprint, correct) for run, fingerprint in tested if (correct := _hits(run))}


def _hits(run: RunRecord) -> list[bool] | None:
    """Return whether each test image was predicted correctly; None if predictions.csv lacks a test image."""
    try:
        table = read_rows(run.path / "predictions.csv", ("index", "label", "predicted"))
        rows = sorted((int(row["index"]), row["label"], row["predicted"]) for row in table)
    except (KeyError, ValueError):
        return None
    complete = rows and len(rows) == run.test.get("images") and [index for index, _, _ in rows] == [*range(len(rows))]
    return [label == predicted for _, label, predicted in rows] if complete else None


def pairs(runs: Sequence[RunRecord], hits: Mapping[str, Hits]) -> tuple[list[tuple[str, str, McNemar]], list[str]]:
    """Apply McNemar's test to pairs of runs that were tested on the same images.

    Up to five runs on the same images are compared pairwise. With more, each is compared with the most accurate one.

    Args:
        hits: `hits_by_run` of the runs.

    Returns:
        The names of each pair with its test, and messages about runs that are not compared.
    """
    tested = [run for run in runs if run.test]
    if len(tested) < 2:
        return [], []
    messages = []
    if missing := [run.name for run in tested if run.name not in hits]:
        messages.append(
            f"not compared image by image, because predictions.csv is missing or incomplete: {', '.join(missing)}"
        )
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


# ---- Data.


def data_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line about each further data set that runs used, compared with that of the first run."""
    by_data: dict[str, RunRecord] = {}
    for run in runs:
        if data := _data_text(run):
            by_data.setdefault(data, run)
    each, what = [*by_data.values()], "used different data"
    return [f"{each[0].name} and {run.name} {what}: {_data_difference(each[0], run)}" for run in each[1:]]


def _data_text(run: RunRecord) -> str:
    """Return the `data` entry of metrics.json as text; empty if it is missing."""
    data = run.metrics.get("data")
    return json.dumps(data, sort_keys=True) if isinstance(data, dict) else ""


def _data_difference(first: RunRecord, second: RunRecord) -> str:
    """Return what differs. The labels and the split of different images cannot be compared."""
    data, other = first.metrics["data"], second.metrics["data"]
    counts = f"{data.get('train')} and {other.get('train')} training images"
    changed = _changed_labels(first, second)
    labels = "labels" if changed is None else f"labels of {changed} images"
    names = {"images": f"images ({counts})"} if data.get("images") != other.get("images") else {}
    names = names or {"labels": labels, "split": f"split ({counts})", "classes": "classes"}
    texts = [text for name, text in names.items() if data.get(name) != other.get(name)]
    tests = {run.test["fingerprint"] for run in (first, second) if run.test.get("fingerprint")}
    return ", ".join([*texts, *(["test set"] if len(tests) > 1 else [])])


def _changed_labels(first: RunRecord, second: RunRecord) -> int | None:
    """Return how many images have other labels in the table of the second run; None if the tables do not say so."""
    roots = [Path(str(run.settings.get("data.root"))).expanduser() for run in (first, second)]
    if not all(root.suffix.lower() in TABLES and root.is_file() for root in roots):
        return None
    try:
        for root in roots:  # a file that the configuration of someone else may name
            file_size(root, MAX_LABELS)
        table, other = ({root.absolute().parent / row.path: row.label for row in read_table(root)} for root in roots)
    except (UsageError, OSError):
        return None
    return sum(other.get(path, label) != label for path, label in table.items()) or None


# ---- Plot the curves.

# Okabe and Ito's palette for all colour vision, without its yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
STYLES = ("-", "--", ":", "-.")  # line styles; each is used with all colours before the next
SIDE, ROW = 4.6, 3.1  # inches of one panel


def epochs_done(row: Mapping[str, float], ends: Mapping[float, float]) -> float:
    """Return the epochs completed at a row of the curves. ends: the last step of each epoch."""
    begin, end = ends.get(row["epoch"] - 1, 0.0), ends[row["epoch"]]
    return row["epoch"] + (row.get("step", end) - begin) / max(end - begin, 1.0)


def plot_curves(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    """Draw accuracy and training loss over epochs, and over seconds if the training time is known, as a PNG.

    The accuracy is the validation accuracy, or the training accuracy if no run validates. Runs with the same label have
    the same colour. The user's matplotlibrc is ignored: it could select TeX. Raise ValueError if no run has a curve.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    curves = [[row for row in read_curves(run.path) if "epoch" in row] for run in runs]
    parts = [part for part in ("val", "train") if any(f"{part}/accuracy" in row for rows in curves for row in rows)]
    if not parts:
        raise ValueError("none of these runs has a curve yet")
    seconds_per_epoch = [(run.metrics.get("train_seconds") or 0) / (run.metrics.get("epochs") or 1) for run in runs]
    appearance = dict(zip(dict.fromkeys(labels), cycle(product(STYLES, COLOURS)), strict=False))
    panels = 2 if any(seconds_per_epoch) else 1
    columns = min(len(appearance), 1 + panels)
    height = 2 * ROW + 0.22 * -(-len(appearance) // columns) + 0.2
    lines: dict[str, Any] = {}
    with style.context("default"):
        figure = Figure(figsize=(SIDE * panels, height), dpi=150, layout="constrained")
        grid = figure.subplots(2, panels, sharex="col", sharey="row", squeeze=False)
        for axes_row, name, scale in zip(grid, (f"{parts[0]}/accuracy", "train/loss"), (100.0, 1.0), strict=True):
            for rows, label, seconds in zip(curves, labels, seconds_per_epoch, strict=True):
                ends = {row["epoch"]: row.get("step", 0.0) for row in rows}
                points = [(epochs_done(row, ends), scale * row[name]) for row in rows if name in row]
                for axes, unit in zip(axes_row, (1.0, seconds), strict=False):
                    if unit and points:
                        x, y = [unit * epoch for epoch, _ in points], [value for _, value in points]
                        marker = "o" if len(points) == 1 else None
                        linestyle, colour = appearance[label]
                        drawn = axes.plot(x, y, ls=linestyle, color=colour, lw=1.4, marker=marker, markersize=4)
                        lines.setdefault(label, drawn[0])
        for axes in grid.flat:
            axes.grid(color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.set_xlim(left=0)
            axes.spines[["top", "right"]].set_visible(False)
        grid[0][0].set_ylabel({"val": "validation accuracy, %", "train": "training accuracy, %"}[parts[0]])
        grid[1][0].set_ylabel("training loss")
        for axes, text in zip(grid[1], ("epochs", "training time, s (at each run's mean epoch)"), strict=False):
            axes.set_xlabel(text)
        names = [printable(label).replace("$", r"\$") for label in lines]  # matplotlib parses formulas between dollars
        figure.legend(list(lines.values()), names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        figure.savefig(file, format="png")
