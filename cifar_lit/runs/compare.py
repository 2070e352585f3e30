"""Compare runs: settings that differ, results, and statistical tests of the differences."""

from __future__ import annotations

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
from cifar_lit.base.stats import holm, limits_text, mcnemar
from cifar_lit.base.text import natural_key
from cifar_lit.run.folder import LOCK
from cifar_lit.run.record import changes_text, read_metrics, read_rows, scores_of

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

        `interval` is the 95 % interval of the test accuracy as text.
        """
        test, val = self.test, scores_of(self.metrics, "val")
        low, high = test.get("interval") or (None, None)
        figures = {name: test.get(name) for name in ("accuracy", "loss")}
        figures["interval"] = limits_text({"low": low, "high": high}, ".2f", 0.01)
        figures["val_accuracy"] = val.get("accuracy")
        for name in ("train_seconds", "parameters"):
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


class PairTest(NamedTuple):
    """McNemar's test of two runs."""

    first: str
    second: str
    only_first: int  # images that only the first run has right
    only_second: int
    p: float  # mid-p value, corrected for the number of pairs (Holm)


def pairs(runs: Sequence[RunRecord]) -> tuple[list[PairTest], list[str]]:
    """Apply McNemar's test to all pairs of runs with the same test images.

    Returns:
        The tests, and messages about runs that are not compared.
    """
    by_images: dict[str, dict[str, np.ndarray]] = {}  # by fingerprint of the test images and name of the run
    missing = []
    tested = [run for run in runs if run.test]
    for run in tested:
        rows = read_rows(run.path / "predictions.csv")
        if len(rows) != run.test["images"]:
            missing.append(run.name)
            continue
        hits = by_images.setdefault(run.test["fingerprint"], {})
        hits[run.name] = np.array([row.get("label") == row.get("predicted") for row in rows])
    messages = []
    if missing and len(tested) > 1:
        names = ", ".join(missing)
        messages.append(f"not compared image by image, because predictions.csv is missing or incomplete: {names}")
    if len(by_images) > 1:
        messages.append("runs with different test images are not compared image by image")
    tests = []
    for hits in by_images.values():
        for first, second in combinations(hits, 2):
            only_first = int((hits[first] & ~hits[second]).sum())
            only_second = int((hits[second] & ~hits[first]).sum())
            tests.append(PairTest(first, second, only_first, only_second, mcnemar(only_first, only_second)))
    values = holm([test.p for test in tests])
    return [test._replace(p=p) for test, p in zip(tests, values, strict=True)], messages


def data_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line about each further data set that runs used, compared with that of the first run."""
    different: dict[str, RunRecord] = {}
    for run in runs:
        if run.data:
            different.setdefault(run.data, run)
    lines = []
    records = list(different.values())
    for run in records[1:]:
        data, other_data = records[0].metrics["data"], run.metrics["data"]
        differ = ", ".join(name for name, value in data.items() if value != other_data[name])
        lines.append(f"{records[0].name} and {run.name} used different data: {differ}")
    return lines
