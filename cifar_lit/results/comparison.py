"""Runs beside each other: what was set otherwise, what came out, and which of it is more than chance."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cifar_lit.errors import UsageError
from cifar_lit.results.intervals import McNemar, mcnemar, mean_interval, wilson_interval
from cifar_lit.results.plain_yaml import plain_values
from cifar_lit.results.run_folder import read_metrics, shown

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
    record = RunRecord(path, shown(path), settings, metrics, _read_curves(path / "metrics.csv"))
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
