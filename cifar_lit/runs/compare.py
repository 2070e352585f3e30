"""Compare runs: settings that differ, results, and statistical tests of the differences."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.settings import plain_values
from cifar_lit.base.stats import holm, mcnemar
from cifar_lit.base.text import natural_key
from cifar_lit.run.folder import LOCK
from cifar_lit.run.record import GROUP, changes_text, read_metrics, scores_of

SEED = "seed_everything"
PLACES = ("logs", "ckpt_path", "weights_only")  # settings about files, ignored in the comparison
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
        return scores_of(self.metrics)

    @property
    def recipe(self) -> str:
        """Name of the recipe, or –."""
        recipe = self.metrics.get("recipe", self.settings.get("recipe"))
        if recipe is None:
            return "–"
        return str(recipe)

    @property
    def seed(self) -> object:
        """The seed; None if it is unknown or the run has none (`seed_everything: false`)."""
        seed: object = self.settings.get(SEED, self.metrics.get("seed"))
        if seed is False:
            return None
        return seed

    @property
    def data(self) -> str:
        """The `data` entry of metrics.json as text; empty if it is missing."""
        data = self.metrics.get("data")
        return json.dumps(data, sort_keys=True) if data else ""

    @property
    def figures(self) -> dict[str, Any]:
        """The values to compare by name (None if unknown), then all other scores on the test and validation images.

        `low` and `high` are the limits of the 95 % interval of the test accuracy.
        """
        test, val = self.test, scores_of(self.metrics, "val")
        low, high = test.get("interval") or (None, None)
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

    A name is a run folder, a folder of runs, or a pattern such as `logs/cpu91-*`. A folder without any run is returned
    as it is, and `read_run` reports that it is broken. Raise UsageError for a name that matches no folder.
    """
    runs: dict[Path, Path] = {}
    for name in names:
        path = Path(name).expanduser()
        matches = [path]
        if not path.exists():
            matches = [Path(match) for match in glob.glob(str(path))]  # noqa: PTH207
        folders = _sorted_folders(matches)
        if not folders:
            raise UsageError(f"there is no folder {name}: name run folders, a pattern of them, or a folder of logs")
        for folder in folders:
            inner: list[Path] = []
            if not _is_run(folder):
                inner = [each for each in _sorted_folders(folder.iterdir()) if _is_run(each)]
            if not inner:
                inner = [folder]
            for run in inner:
                runs.setdefault(run.resolve(), run)
    return list(runs.values())


def _sorted_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders among paths, cpu91-2 before cpu91-10."""
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=lambda folder: natural_key(folder.name))


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def read_run(path: Path) -> RunRecord:
    """Return the contents of a run folder. Missing files are reported in `note`."""
    settings: dict[str, Any] = {}
    if (path / "config.yaml").is_file():
        settings = _flattened(plain_values(path / "config.yaml"))
    for name in PLACES:
        settings.pop(name, None)
    run = RunRecord(path, display_path(path), settings, read_metrics(path))
    return replace(run, note="; ".join(filter(None, (_note(run), changes_text(run.metrics)))))


def _note(run: RunRecord) -> str:
    if run.test:
        return ""
    if run.metrics:
        return "no test"
    if (run.path / "folds.json").is_file():
        return "a cross-validation: compare its runs"
    if not run.settings:
        return "broken: neither config.yaml nor metrics.json"
    if (run.path / LOCK).exists():  # a killed process leaves it
        return "still running, or killed"
    return "did not end"


def _flattened(settings: object, prefix: str = "") -> dict[str, object]:
    """Return nested settings by dotted name. Lists and empty mappings are values."""
    if not isinstance(settings, Mapping):
        return {}
    flat: dict[str, object] = {}
    for name, value in settings.items():
        flat |= _flattened(value, f"{prefix}{name}.") or {f"{prefix}{name}": value}
    return flat


# ---- Settings and pairs.


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value in each run as text, – for a missing value.

    Runs without any settings are not compared.
    """
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.settings)
    texts = {}
    for name in names:
        if any(other.startswith(f"{name}.") for other in names):  # empty or null here, its keys in another run
            continue
        if len({setting_text(run, name) for run in runs if run.settings}) > 1:
            texts[name] = [setting_text(run, name) for run in runs]
    return texts


def setting_text(run: RunRecord, name: str) -> str:
    """Return the value of a setting as text, strings without quotes and other values as JSON."""
    value = run.settings.get(name, "–")
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


class Hits(NamedTuple):
    """Whether each test image was predicted correctly, and the fingerprint of these images."""

    fingerprint: str
    correct: np.ndarray  # bool (N,)
    columns: dict[str, list[str]]  # groups of each image by column, see `data.groups`


def hits_by_run(runs: Sequence[RunRecord]) -> dict[str, Hits]:
    """Return the hits by name of each run with the predictions for all of its test images."""
    found = {}
    for run in runs:
        file = run.path / "predictions.csv"
        if run.test and file.is_file():
            hits = _read_hits(file, run.test["fingerprint"])
            if len(hits.correct) == run.test["images"]:
                found[run.name] = hits
    return found


def _read_hits(file: Path, fingerprint: str) -> Hits:
    correct = []
    columns: dict[str, list[str]] = {}
    with file.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            correct.append(row["label"] == row["predicted"])
            for name, value in row.items():
                if name.startswith(GROUP):
                    columns.setdefault(name.removeprefix(GROUP), []).append(value)
    return Hits(fingerprint, np.array(correct), columns)


class PairTest(NamedTuple):
    """McNemar's test of two runs."""

    first: str
    second: str
    group: str  # column and value of these test images; empty for all images
    only_first: int  # images that only the first run has right
    only_second: int
    p: float  # mid-p value, corrected for the number of pairs, or of pairs and groups (Holm)


def pairs(runs: Sequence[RunRecord], hits: Mapping[str, Hits]) -> tuple[list[PairTest], list[str]]:
    """Apply McNemar's test to all pairs of runs with the same test images, and of up to five to each group of images.

    Returns:
        The tests, and messages about runs that are not compared.
    """
    tested = [run for run in runs if run.test]
    messages = []
    by_images: dict[str, list[str]] = {}
    for name, each in hits.items():
        by_images.setdefault(each.fingerprint, []).append(name)
    missing = ", ".join(run.name for run in tested if run.name not in hits)
    if missing and len(tested) > 1:
        messages.append(f"not compared image by image, because predictions.csv is missing or incomplete: {missing}")
    if len(by_images) > 1:
        messages.append("runs with different test images are not compared image by image")
    tests: list[PairTest] = []
    of_groups: list[PairTest] = []
    for names in by_images.values():
        correct = np.stack([hits[name].correct for name in names])
        tests += _pair_tests(names, correct, "")
        columns: dict[str, list[str]] = {}
        if len(names) <= 5:
            for name in names:
                columns |= hits[name].columns
        for column, values in columns.items():
            for value in dict.fromkeys(values):
                group = f"{column} {value or 'without a value'}"
                of_groups += _pair_tests(names, correct[:, np.array(values) == value], group)
    return [*_corrected(tests), *_corrected(of_groups)], messages


def _pair_tests(names: Sequence[str], correct: np.ndarray, group: str) -> list[PairTest]:
    """Return the tests of all pairs, without correction. correct: bool (runs, images)."""
    right = correct.astype(float)
    only = right @ (1 - right).T  # images that only the run of the row has right, not that of the column
    tests = []
    for first, second in combinations(range(len(names)), 2):
        counts = int(only[first, second]), int(only[second, first])
        tests.append(PairTest(names[first], names[second], group, *counts, mcnemar(*counts)))
    return tests


def _corrected(tests: Sequence[PairTest]) -> list[PairTest]:
    values = holm([test.p for test in tests])
    return [test._replace(p=p) for test, p in zip(tests, values, strict=True)]


def data_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line about each further data set that runs used, compared with that of the first run."""
    different: dict[str, RunRecord] = {}
    for run in runs:
        if run.data:
            different.setdefault(run.data, run)
    lines = []
    records = list(different.values())
    for run in records[1:]:
        differ = ", ".join(_differing_data(records[0], run))
        lines.append(f"{records[0].name} and {run.name} used different data: {differ}")
    return lines


def _differing_data(run: RunRecord, other: RunRecord) -> list[str]:
    """Return what differs: parts of the data, numbers of images, and settings of the data."""
    data, other_data = run.metrics["data"], other.metrics["data"]
    parts = []
    for name, value in data.items():
        if value == other_data[name]:
            continue
        if isinstance(value, int):
            name = f"{name} ({value} and {other_data[name]})"
        parts.append(name)
    return parts + [name for name in differing([run, other]) if name.startswith("data.")]
