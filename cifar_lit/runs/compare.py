"""Compare runs: the settings that differ, the results, and which differences are more than chance."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, compress, cycle, product
from pathlib import Path
from typing import Any

from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import LOCK, display_path, read_curves, read_metrics, read_rows
from cifar_lit.stats import McNemar, mcnemar, mean_interval, wilson_interval
from cifar_lit.text import natural_key, printable

# ---- What a run's folder says.

SEED = "seed_everything"
PLACES = ("logs", "ckpt_path", "weights_only")  # settings that say where files lie, not what was computed
RUN_FILES = ("config.yaml", "metrics.json", "metrics.csv", LOCK)


@dataclass(frozen=True)
class RunRecord:
    """A run.

    name: as the user would type it. settings: of config.yaml by dotted name, without those of places. metrics: of metrics.json.
    note: why figures are missing, empty when none are.
    """

    path: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def test(self) -> dict[str, Any]:
        """The test's part of metrics.json, empty where there was none."""
        test = self.metrics.get("test")
        return test if isinstance(test, dict) and isinstance(test.get("accuracy"), int | float) else {}

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.metrics.get("recipe") or self.settings.get("recipe") or "–")

    @property
    def seed(self) -> Any:
        """The seed."""
        return self.settings.get(SEED, self.metrics.get("seed"))

    @property
    def figures(self) -> dict[str, Any]:
        """What is compared, by name, None where it is not known; at the end whatever else the test or the validation counted.

        low, high: the 95 % interval of the accuracy, for tests that say of how many images.
        """
        test, val, images = self.test, self.metrics.get("val") or {}, self.test.get("images")
        low, high = wilson_interval(round(test["accuracy"] * images), images) if images else (None, None)
        figures = {"accuracy": test.get("accuracy"), "low": low, "high": high, "loss": test.get("loss")}
        figures["val_accuracy"] = val.get("accuracy")
        figures |= {
            name: self.metrics.get(name) for name in ("train_seconds", "images_per_second", "parameters", "epochs")
        }
        for prefix, scores in (("", test), ("val_", val)):
            for name, value in scores.items():
                if name not in ("accuracy", "loss", "images") and isinstance(value, int | float):
                    figures[prefix + name] = value
        return figures


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders that are named: folders of runs, folders of logs, or patterns such as `logs/laptop-*`; each once.

    A folder that holds no run is taken for a run, which its record tells to be broken. Raises UsageError for a name that
    stands for no folder.
    """
    runs: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(str(path))]
        folders = sorted(filter(Path.is_dir, matches), key=_by_name)
        if not folders:
            wrong = f"{name} is a file" if matches else f"there is no {name}"
            raise UsageError(f"{wrong}: name run folders, a pattern of them, or a folder of logs")
        for folder in folders:
            inner = [] if _is_run(folder) else sorted(filter(_is_run, folder.iterdir()), key=_by_name)
            for run in inner or [folder]:
                runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _by_name(folder: Path) -> Any:
    """Sorts laptop-2 before laptop-10."""
    return natural_key(folder.name)


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def read_run(path: Path) -> RunRecord:
    """What a folder says; what is wrong with it is in the record's `note`, never raised."""
    try:
        config = (
            plain_values(path / "config.yaml") if (path / "config.yaml").is_file() else None
        )  # a pipe would be waited for
    except UsageError:
        config = None
    settings = _flattened(config) if isinstance(config, dict) else {}
    settings = {name: value for name, value in settings.items() if name not in PLACES}
    record = RunRecord(path, display_path(path), settings, read_metrics(path))
    if record.metrics:
        note = "its config.yaml is missing or damaged" if not settings else "" if record.test else "no test"
    elif (path / "metrics.json").exists():
        note = "damaged: metrics.json cannot be read"
    elif (path / "folds.json").is_file():
        note = "a cross-validation: compare its runs"
    elif (path / "predictions.csv").is_file():
        note = "predictions only"
    elif not settings:
        note = "broken: neither config.yaml nor metrics.json"
    else:  # a running process holds the lock, and one that was killed leaves it
        note = "still running, or killed" if (path / LOCK).exists() else "did not end"
    return replace(record, note=note)


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name; lists stay values."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flattened(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


# ---- Settings, groups and pairs.


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs that have any, with each run's value as text; – where it has none."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    texts = {name: [_setting_text(run, name) for run in runs] for name in names}
    known = [bool(run.settings) for run in runs]
    return {name: values for name, values in texts.items() if len(set(compress(values, known))) > 1}


def _setting_text(run: RunRecord, name: str) -> str:
    """A setting's value as one would type it."""
    value = run.settings.get(name, "–")
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    )  # dates too


def groups(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Tested runs of one recipe and the same settings but for the seed, taken together.

    Of each group: `recipe`, `settings` (those that differ between groups, as texts), `runs` (names), `seeds`, and of
    `accuracy` and `train_seconds` what `mean_interval` gives.
    """
    tested = [run for run in runs if run.test]
    names = [name for name in differing(tested) if name not in (SEED, "recipe")]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in tested:
        members.setdefault((run.recipe, *(_setting_text(run, name) for name in names)), []).append(run)
    summaries = []
    for (recipe, *texts), group in members.items():
        seconds = [run.metrics["train_seconds"] for run in group if run.metrics.get("train_seconds")]
        summaries.append(
            {
                "recipe": recipe,
                "settings": dict(zip(names, texts, strict=True)),
                "runs": [run.name for run in group],
                "seeds": [run.seed for run in group],
                "accuracy": mean_interval([run.test["accuracy"] for run in group]),
                "train_seconds": mean_interval(seconds) if seconds else None,
            }
        )
    return summaries


def _right_answers(run: RunRecord) -> list[bool] | None:
    """Whether each test image in order was named right; None where predictions.csv does not say.

    It must have a row for each test image of metrics.json, or it is of another test.
    """
    try:
        table = read_rows(run.path / "predictions.csv", ("index", "label", "predicted"))
        rows = sorted((int(row["index"]), row["label"], row["predicted"]) for row in table)
    except (KeyError, ValueError):
        return None
    whole = rows and len(rows) == run.test.get("images") and all(row[0] == place for place, row in enumerate(rows))
    return [label == predicted for _, label, predicted in rows] if whole else None


def pairs(runs: Sequence[RunRecord]) -> tuple[list[tuple[str, str, McNemar]], list[str]]:
    """McNemar's test of tested runs that saw the same test images, and one line for each reason why others are left out.

    Of each set of test images every two of up to five runs; of more, each against the one with the best accuracy, named first.
    """
    tested = [run for run in runs if run.test]
    if len(tested) < 2:
        return [], []
    reasons = []
    answers = {run.name: right for run in tested if run.test.get("fingerprint") and (right := _right_answers(run))}
    if missing := [run.name for run in tested if run.name not in answers]:
        reasons.append(
            f"not compared image by image, because predictions.csv is missing or incomplete: {', '.join(missing)}"
        )
    usable = [run for run in tested if run.name in answers]
    sets: dict[str, list[RunRecord]] = {}
    for run in usable:
        sets.setdefault(run.test["fingerprint"], []).append(run)
    if len(sets) > 1:
        reasons.append("runs with different test images are not compared image by image")
    chosen: list[tuple[RunRecord, RunRecord]] = []
    for same in sets.values():
        if len(same) <= 5:
            chosen += combinations(same, 2)
            continue
        best = max(same, key=lambda run: run.test["accuracy"])
        chosen += [(best, run) for run in same if run is not best]
        reasons.append(f"{best.name} was selected as the best on these images, so its p values are slightly too small.")
    tests = []
    for first, second in chosen:
        counts = Counter(zip(answers[first.name], answers[second.name], strict=False))
        tests.append((first.name, second.name, mcnemar(counts[True, False], counts[False, True])))
    return tests, reasons


# ---- Curves.

# Okabe and Ito's colours, told apart with any colour vision; without the yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
STYLES = ("-", "--", ":", "-.")  # one for each time the colours have been gone through
SIDE, ROW = 4.6, 3.1  # inches of one panel


def epochs_done(row: Mapping[str, float], ends: Mapping[float, float]) -> float:
    """How many epochs had been made at a row of the curves. ends: the last row's step of each epoch."""
    begin, end = ends.get(row["epoch"] - 1, 0.0), ends[row["epoch"]]
    return row["epoch"] + (row.get("step", end) - begin) / max(end - begin, 1.0)


def plot_curves(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    """Draw accuracy and training loss against epochs, and against seconds where these are known, as a PNG.

    Accuracy is that of the validation images, or of the training images if no run has any. The user's matplotlibrc
    does not apply: it could choose TeX or the size of the picture.

    Args:
        runs: the runs to draw.
        labels: text in the legend for each run. Runs of one label share its colour.
        file: the PNG to write.

    Raises:
        ValueError: no run has a curve.
    """
    from matplotlib import style

    with style.context("default"):
        _plot_curves(runs, labels, file)


def _plot_curves(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    from matplotlib.figure import Figure

    curves = [[row for row in read_curves(run.path) if "epoch" in row] for run in runs]
    parts = [part for part in ("val", "train") if any(f"{part}/accuracy" in row for rows in curves for row in rows)]
    if not parts:
        raise ValueError("none of these runs has a curve yet")
    times = [
        (run.metrics.get("train_seconds") or 0) / (run.metrics.get("epochs") or 1) for run in runs
    ]  # seconds per epoch
    styles = dict(zip(dict.fromkeys(labels), cycle(product(STYLES, COLOURS)), strict=False))
    panels = 2 if any(times) else 1
    columns = min(len(styles), 1 + panels)
    height = 2 * ROW + 0.22 * -(-len(styles) // columns) + 0.2
    figure = Figure(figsize=(SIDE * panels, height), dpi=150, layout="constrained")
    grid = figure.subplots(2, panels, sharex="col", sharey="row", squeeze=False)
    lines: dict[str, Any] = {}
    for row, name, scale in zip(grid, (f"{parts[0]}/accuracy", "train/loss"), (100.0, 1.0), strict=True):
        for rows, label, seconds in zip(curves, labels, times, strict=True):
            ends = {values["epoch"]: values.get("step", 0.0) for values in rows}  # the step of an epoch's last row
            points = [(epochs_done(values, ends), scale * values[name]) for values in rows if name in values]
            style, colour = styles[label]
            for axes, unit in zip(row, (1.0, seconds), strict=False):
                if unit and points:
                    x, y = [unit * epoch for epoch, _ in points], [value for _, value in points]
                    marker = "o" if len(points) == 1 else None
                    drawn = axes.plot(x, y, linestyle=style, color=colour, linewidth=1.4, marker=marker, markersize=4)
                    lines.setdefault(label, drawn[0])
    for axes in grid.flat:
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel({"val": "validation accuracy, %", "train": "training accuracy, %"}[parts[0]])
    grid[1][0].set_ylabel("training loss")
    for axes, text in zip(grid[1], ("epochs", "seconds of training (at each run's mean epoch)"), strict=False):
        axes.set_xlabel(text)
    names = [printable(label).replace("$", r"\$") for label in lines]  # what stands between dollars would be a formula
    figure.legend(list(lines.values()), names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(file, format="png")
