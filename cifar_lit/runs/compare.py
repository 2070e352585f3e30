"""Runs beside each other: what was set otherwise, what came out, and which of it is more than chance."""

from __future__ import annotations

import csv
import glob
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cifar_lit.errors import UsageError
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.run_folder import display_path, read_metrics

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
NONE_TESTED = "no test"


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says.

    name: as the user would type it. settings: of config.yaml by dotted name, plain values; without those of places. metrics:
    of metrics.json, empty where there is none. curves: the rows of metrics.csv, numbers by column name, None where empty.
    note: why figures are missing, empty when none are.
    """

    path: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    curves: list[dict[str, float | None]] = field(default_factory=list)
    note: str = ""

    @property
    def test(self) -> dict[str, Any]:
        """The test's figures, empty where there was none."""
        found = self.metrics.get("test")
        return found if isinstance(found, dict) and isinstance(found.get("accuracy"), int | float) else {}

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


# ---- reading


def find_runs(words: Sequence[str]) -> list[Path]:
    """The run folders that are named: folders of runs, folders of logs, or patterns such as `logs/laptop-*`; each once.

    A folder that holds no run is taken for a run, which its record tells to be broken. Raises UsageError for a name that
    stands for no folder.
    """
    found: dict[Path, Path] = {}
    for word in words:
        path = Path(word).expanduser()
        names = [] if path.exists() else glob.glob(str(path))  # noqa: PTH207 (a pattern may be absolute)
        matching = [path] if path.exists() else [Path(name) for name in sorted(names, key=_natural)]
        folders = [folder for folder in matching if folder.is_dir()]
        if not folders:
            wrong = f"{word} is a file" if matching else f"there is no {word}"
            raise UsageError(f"{wrong}: name run folders, a pattern of them, or a folder of logs")
        for folder in folders:
            inner = [] if _is_run(folder) else sorted(filter(_is_run, folder.iterdir()), key=_natural)
            for run in inner or [folder]:
                found.setdefault(run.resolve(), run)
    return list(found.values())


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("config.yaml", "metrics.json", "metrics.csv", ".lock"))


def _natural(path: Path | str) -> list[tuple[int, str]]:
    """Sorts laptop-2 before laptop-10."""
    head, _, number = Path(path).name.rpartition("-")
    return [(0, head), (int(number), "")] if number.isdigit() else [(0, Path(path).name)]


def read_run(path: Path) -> RunRecord:
    """What a folder says; what is wrong with it is in the record's `note`, never raised."""
    metrics = read_metrics(path)
    try:
        found = plain_values(path / "config.yaml")
    except UsageError:
        found = None
    settings = flattened(found) if isinstance(found, dict) else {}
    settings = {name: value for name, value in settings.items() if name not in PLACES}
    record = RunRecord(path, display_path(path), settings, metrics, _read_curves(path / "metrics.csv"))
    if note := _note(record):
        record = RunRecord(record.path, record.name, record.settings, record.metrics, record.curves, note)
    return record


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
    return "" if run.test else NONE_TESTED


def _read_curves(path: Path) -> list[dict[str, float | None]]:
    """The rows of a metrics.csv that are whole; none where it cannot be read."""
    rows: list[dict[str, float | None]] = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                try:
                    rows.append({name: float(value) if value else None for name, value in row.items() if name})
                except ValueError:  # the line that a running process is writing
                    continue
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    return rows


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
    found: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in tested:
        found.setdefault((run.recipe, *(setting_text(run.settings, name) for name in names)), []).append(run)
    return [
        {
            "recipe": key[0],
            "settings": dict(zip(names, key[1:], strict=True)),
            "runs": [run.name for run in members],
            "seeds": [run.seed for run in members],
            "accuracy": mean_interval([run.test["accuracy"] for run in members]),
            "train_seconds": mean_interval(seconds)
            if (seconds := [run.metrics["train_seconds"] for run in members if run.metrics.get("train_seconds")])
            else None,
        }
        for key, members in found.items()
    ]


# ---- pairs


def right_answers(run: RunRecord) -> tuple[list[str], list[bool]] | None:
    """Labels of the test images in order, and whether each was named right; None where predictions.csv does not say.

    It must have a row for each test image of metrics.json, or it is of another test.
    """
    try:
        with (run.path / "predictions.csv").open(newline="") as file:
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
    lines = []
    answers = {run.name: right_answers(run) for run in tested}
    if missing := [run.name for run in tested if answers[run.name] is None or not run.test.get("fingerprint")]:
        lines.append(f"not tested against the others image by image, for want of a whole predictions.csv: {', '.join(missing)}")
    usable = [run for run in tested if run.name not in missing]
    if len({run.test["fingerprint"] for run in usable}) > 1:
        lines.append("runs that were tested on other images than each other are not tested against each other")
    if len(usable) > 5:
        best = max(usable, key=lambda run: run.test["accuracy"])
        wanted = [(best, run) for run in usable if run is not best]
        lines.append(f"{best.name} was chosen as the best on these same images, so that its p values are somewhat too small.")
    else:
        wanted = [(first, second) for place, first in enumerate(usable) for second in usable[place + 1 :]]
    found = []
    for first, second in wanted:
        one, other = answers[first.name], answers[second.name]
        if first.test["fingerprint"] != second.test["fingerprint"] or one is None or other is None or one[0] != other[0]:
            continue
        only = [sum(a and not b for a, b in zip(x, y, strict=True)) for x, y in ((one[1], other[1]), (other[1], one[1]))]
        found.append((first.name, second.name, mcnemar(*only)))
    return found, lines
