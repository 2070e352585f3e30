"""Runs beside each other: what was set otherwise, what came out, and which of it is more than chance."""

from __future__ import annotations

import csv
import glob
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import display_path, read_curves, read_metrics

# ---- How sure a figure is: intervals of means and of accuracies, and the test of a difference on the same images.


def t_within(t: float, freedom: int) -> float:
    """The probability that Student's t with `freedom` degrees lies between -t and t.

    The finite sums for whole degrees of freedom, Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(3 if odd else 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that Student's t with `freedom` degrees stays within with probability `confidence`, by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < confidence else (low, middle)
    return high


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Number, mean, standard deviation (of the sample) and 95 % interval of the mean (`low`, `high`).

    A single value has no deviation and no interval: these are None.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"n": len(values), "mean": mean, "std": None, "low": None, "high": None}
    std = statistics.stdev(values)
    half = t_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return {"n": len(values), "mean": mean, "std": std, "low": mean - half, "high": mean + half}


Z95 = 1.959964  # the standard normal lies within ± this with probability 0.95


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a fraction of `count` independent images of which `right` were right; count at least 1.

    Wilson's score interval (1927), which stays within 0 … 1 and holds its confidence near both ends.
    """
    share, square = right / count, Z95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


class McNemar(NamedTuple):
    """Two classifiers on the same images. first, second: images that only the one, only the other has right. p: below."""

    first: int
    second: int
    exact: float
    mid: float


def mcnemar(first: int, second: int) -> McNemar:
    """McNemar's test whether two classifiers err equally often, from the images that only one of them has right.

    exact: the two-sided probability of a split at least as uneven as this, if each of these images fell to either with
    probability 1/2. mid: the mid-p value, which counts half of the probability of the split itself; it is less cautious and
    recommended for accuracies (Fagerland, Lydersen and Laake, BMC Medical Research Methodology 13:91, 2013).
    Both in whole numbers, so that they hold for any count.
    """
    count, least = first + second, min(first, second)
    term = below = 1  # binomial coefficients: of `least`, and their sum up to it
    for place in range(1, least + 1):
        term = term * (count - place + 1) // place
        below += term
    if first == second:
        return McNemar(first, second, 1.0, (2**count * 2 - term) / (2**count * 2) if count else 1.0)
    return McNemar(first, second, 2 * below / 2**count, (2 * below - term) / 2**count)


SEED = "seed_everything"
PLACES = ("logs", "ckpt_path", "weights_only")  # settings that say where files lie, not what was computed


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says.

    name: as the user would type it. settings: of config.yaml by dotted name, plain values; without those of places. metrics:
    of metrics.json, empty where there is none. curves: the rows of metrics.csv by column. note: why figures are missing, empty
    when none are.
    """

    path: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    curves: list[dict[str, float]] = field(default_factory=list)
    note: str = ""

    @property
    def test(self) -> dict[str, Any]:
        """The test's figures, empty where there was none."""
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
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the test accuracy; None without a test, or where it does not say of how many images."""
        images = self.test.get("images")
        return wilson_interval(round(self.test["accuracy"] * images), images) if images else None

    @property
    def figures(self) -> dict[str, Any]:
        """What is compared, by name, None where it is not known; at the end whatever else the test or the validation counted."""
        val = self.metrics.get("val")
        val = val if isinstance(val, dict) else {}
        low, high = self.interval or (None, None)
        figures = {"accuracy": self.test.get("accuracy"), "low": low, "high": high, "loss": self.test.get("loss")}
        figures |= {"val_accuracy": val.get("accuracy")}
        figures |= {name: self.metrics.get(name) for name in ("train_seconds", "images_per_second", "parameters", "epochs")}
        for prefix, scores in (("", self.test), ("val_", val)):
            further = {name: value for name, value in scores.items() if name not in ("accuracy", "loss", "images")}
            figures |= {prefix + name: value for name, value in further.items() if isinstance(value, int | float)}
        return figures


# ---- reading


def find_runs(names: Sequence[str]) -> list[Path]:
    """The run folders that are named: folders of runs, folders of logs, or patterns such as `logs/laptop-*`; each once.

    A folder that holds no run is taken for a run, which its record tells to be broken. Raises UsageError for a name that
    stands for no folder.
    """
    runs: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207 (may be absolute)
        matching = sorted(matches, key=_natural)
        folders = [folder for folder in matching if folder.is_dir()]
        if not folders:
            wrong = f"{name} is a file" if matching else f"there is no {name}"
            raise UsageError(f"{wrong}: name run folders, a pattern of them, or a folder of logs")
        for folder in folders:
            inner = [] if _is_run(folder) else sorted(filter(_is_run, folder.iterdir()), key=_natural)
            for run in inner or [folder]:
                runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("config.yaml", "metrics.json", "metrics.csv", ".lock"))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts laptop-2 before laptop-10."""
    head, _, number = path.name.rpartition("-")
    return [(0, head), (int(number), "")] if number.isdigit() else [(0, path.name)]


def read_run(path: Path) -> RunRecord:
    """What a folder says; what is wrong with it is in the record's `note`, never raised."""
    metrics = read_metrics(path)
    try:
        config = plain_values(path / "config.yaml")
    except UsageError:
        config = None
    settings = flattened(config) if isinstance(config, dict) else {}
    settings = {name: value for name, value in settings.items() if name not in PLACES}
    record = RunRecord(path, display_path(path), settings, metrics, read_curves(path))
    return replace(record, note=_note(record))


def _note(run: RunRecord) -> str:
    if not run.metrics:
        if (run.path / "metrics.json").exists():
            return "damaged: metrics.json cannot be read"
        if not run.settings:
            return "broken: neither config.yaml nor metrics.json"
        # a running process holds .lock, and one that was killed leaves it
        return "still running, or killed" if (run.path / ".lock").exists() else "did not end"
    if not run.settings:
        return "its config.yaml is missing or damaged"
    return "" if run.test else "no test"


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name; lists stay values."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# ---- settings and groups


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs that have any, with each run's value as text; – where it has none."""
    known = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in known for name in run.settings)
    texts = {name: [setting_text(run.settings, name) for run in runs] for name in names}
    return {
        name: values
        for name, values in texts.items()
        if len({value for value, run in zip(values, runs, strict=True) if run.settings}) > 1
    }


def setting_text(settings: Mapping[str, Any], name: str) -> str:
    """A setting's value as one would type it."""
    if name not in settings:
        return "–"
    value = settings[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def groups(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Tested runs of one recipe and the same settings but for the seed, taken together.

    Of each group: `recipe`, `settings` (those that differ between groups, as texts), `runs` (names), `seeds`, and of
    `accuracy` and `train_seconds` number, mean, deviation and the mean's 95 % interval, as `mean_interval` gives them.
    """
    tested = [run for run in runs if run.test]
    names = [name for name in differing(tested) if name not in (SEED, "recipe")]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in tested:
        members.setdefault((run.recipe, *(setting_text(run.settings, name) for name in names)), []).append(run)
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


# ---- pairs


def right_answers(run: RunRecord) -> tuple[list[str], list[bool]] | None:
    """Labels of the test images in order, and whether each was named right; None where predictions.csv does not say.

    It must have a row for each test image of metrics.json, or it is of another test.
    """
    try:
        with (run.path / "predictions.csv").open(newline="", encoding="utf-8") as file:
            rows = {int(row["index"]): (row["label"], row["predicted"]) for row in csv.DictReader(file)}
    except (OSError, KeyError, TypeError, ValueError, csv.Error):
        return None
    if not rows or sorted(rows) != list(range(len(rows))) or len(rows) != run.test.get("images"):
        return None
    ordered = [rows[index] for index in range(len(rows))]
    return [label for label, _ in ordered], [label == predicted for label, predicted in ordered]


def pairs(runs: Sequence[RunRecord]) -> tuple[list[tuple[str, str, McNemar]], list[str]]:
    """McNemar's test of tested runs that saw the same test images, and one line for each reason why others are left out.

    Every two of up to five runs; of more, each against the one with the best accuracy, which is named first.
    """
    tested = [run for run in runs if run.test]
    if len(tested) < 2:
        return [], []
    reasons = []
    answers = {run.name: both for run in tested if run.test.get("fingerprint") and (both := right_answers(run))}
    if missing := [run.name for run in tested if run.name not in answers]:
        reasons.append(f"not tested against the others image by image, for want of a whole predictions.csv: {', '.join(missing)}")
    usable = [run for run in tested if run.name in answers]
    if len({run.test["fingerprint"] for run in usable}) > 1:
        reasons.append("runs that were tested on other images than each other are not tested against each other")
    if len(usable) > 5:
        best = max(usable, key=lambda run: run.test["accuracy"])
        chosen = [(best, run) for run in usable if run is not best]
        reasons.append(f"{best.name} was chosen as the best on these same images, so that its p values are somewhat too small.")
    else:
        chosen = list(combinations(usable, 2))
    tests = []
    for first, second in chosen:
        (labels, right), (other_labels, other_right) = answers[first.name], answers[second.name]
        if first.test["fingerprint"] == second.test["fingerprint"] and labels == other_labels:
            only_first = sum(one and not other for one, other in zip(right, other_right, strict=True))
            only_second = only_first + sum(other_right) - sum(right)
            tests.append((first.name, second.name, mcnemar(only_first, only_second)))
    return tests, reasons


# ---- curves

# Okabe and Ito's colours, told apart with any colour vision; without the yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
STYLES = ("-", "--", ":", "-.")  # one for each time the colours have been gone through
SIDE, ROW = 4.6, 3.1  # inches of one panel


def curve(run: RunRecord, name: str) -> tuple[list[float], list[float]]:
    """Epochs that have ended, and the values of one column after each; metrics.csv counts epochs from 0."""
    rows = [row for row in run.curves if "epoch" in row and name in row]
    return [row["epoch"] + 1 for row in rows], [row[name] for row in rows]


def seconds_per_epoch(run: RunRecord) -> float | None:
    """The mean over the training, None where it is not known."""
    seconds, epochs = run.metrics.get("train_seconds"), run.metrics.get("epochs")
    return seconds / epochs if seconds and epochs else None


def plot_curves(runs: Sequence[RunRecord], labels: Sequence[str], file: Path) -> None:
    """Draws accuracy and training loss against epochs, and against seconds where these are known, as a PNG.

    labels: what stands in the legend for each run; runs of one label share its colour. Accuracy is of the validation images,
    of the training images where no run has any. Raises ValueError when no run has a curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(labels))
    accuracy = next((name for name in ("val/accuracy", "train/accuracy") if any(curve(run, name)[0] for run in runs)), None)
    if accuracy is None:
        raise ValueError("none of these runs has a curve yet")
    timed = any(seconds_per_epoch(run) for run in runs)
    columns = min(len(names), 3 if timed else 2)
    legend_rows = -(-len(names) // columns)
    height = 2 * ROW + 0.22 * legend_rows + 0.2
    figure = Figure(figsize=(SIDE * (1 + timed), height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 1 + timed, sharex="col", sharey="row", squeeze=False)
    what = {"val/accuracy": "validation accuracy, %", "train/accuracy": "training accuracy, %", "train/loss": "training loss"}
    lines: dict[str, Any] = {}
    for row, (name, scale) in enumerate(((accuracy, 100.0), ("train/loss", 1.0))):
        for run, label in zip(runs, labels, strict=True):
            epochs, values = curve(run, name)
            place = names.index(label)
            style = {
                "color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS) % len(STYLES)],
                "linewidth": 1.4, "marker": "o" if len(epochs) == 1 else None, "markersize": 4,
            }  # fmt: skip
            for column, unit in enumerate((1.0, seconds_per_epoch(run))[: 1 + timed]):
                if unit and epochs:
                    drawn = grid[row][column].plot(
                        [epoch * unit for epoch in epochs], [scale * value for value in values], **style
                    )
                    lines.setdefault(label, drawn[0])
        grid[row][0].set_ylabel(what[name])
    for axes in grid.flat:
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(color="#999999", labelcolor="#333333")
    for column, text in enumerate(("epochs", "seconds of training (at each run's mean epoch)")[: 1 + timed]):
        grid[1][column].set_xlabel(text)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.savefig(file, format="png")
