"""Read and write the files of a run that need no tensors: metrics.json and metrics.csv."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from cifar_lit.base.files import read_json, write_text
from cifar_lit.base.stats import SIGNIFICANT
from cifar_lit.base.text import counted
from cifar_lit.training.score import METRICS

GROUP = "group_"  # begins the columns of groups in predictions.csv
FEW_CLASSES = 20  # at most so many have names and numbers each in pictures and tables
Metrics = dict[str, Any]  # contents of metrics.json, or its `test` or `val` part; see docs/schema/metrics.schema.json


class GroupResult(TypedDict):
    """Results for the test images with one value of a column, in `test.groups`."""

    value: str
    images: int
    accuracy: float
    interval: list[float]  # 95 % interval of the accuracy (Wilson)
    # Probability that a group as good as all images has at most as many right (binomial), corrected for the number of
    # groups (Holm).
    p: float


def read_metrics(run: Path) -> Metrics:
    """Return the contents of a run's metrics.json, empty before the run is finished."""
    return read_json(run / "metrics.json")


def scores_of(metrics: Metrics, part: str = "test") -> Metrics:
    """Return the scores of a part in metrics.json, empty if it was not scored."""
    return metrics.get(part) or {}


def shown_scores(scores: Metrics, classes: int) -> Metrics:
    """Return the numbers of a part of metrics.json besides counts, without further copies of the accuracy.

    Balanced accuracy and macro F1 are left out if classes have equal sizes, and top-5 accuracy for few classes.
    """
    copies = {"images"}
    if classes <= FEW_CLASSES:
        copies.add("top5")
    if round(scores.get("accuracy") or 0, 4) == round(scores.get("balanced_accuracy") or 0, 4):
        copies |= {"balanced_accuracy", "macro_f1"}
    return {name: value for name, value in scores.items() if name not in copies and isinstance(value, int | float)}


def score_title(name: str) -> str:
    """Return the name of a score in texts."""
    return METRICS[name].text if name in METRICS else name.replace("_f1", " F1").replace("_", " ")


def weights_text(metrics: Metrics) -> str:
    """Return which weights were tested, such as `best of epoch 3`; empty if it is unknown."""
    tested = metrics.get("tested")
    if not tested:
        return ""
    name = tested["checkpoint"].removesuffix(".ckpt")
    if not tested["step"]:
        return f"{name}, from before the first training step"
    return f"{name} of epoch {tested['epoch']} (step {tested['step']:,})"


def changes_text(metrics: Metrics) -> str:
    """Return the settings that changed when a run was resumed, such as `from step 60: trainer.devices 2`, or ''."""
    lines = []
    for change in metrics.get("changes", []):
        text = ", ".join(f"{name} {value}" for name, value in change["settings"].items())
        lines.append(f"from step {change['step']}: {text}")
    return "; ".join(lines)


def group_lines(test: Metrics) -> list[str]:
    """Return a line about the groups of each column of the `test` part of metrics.json."""
    lines = []
    for name, groups in test.get("groups", {}).items():
        worse = [group for group in groups if group["p"] < SIGNIFICANT]
        line = f"{len(worse)} of {counted(len(groups), 'group')} by {name} worse than all images by more than chance"
        for group in worse[:1]:
            line += f": {group['value'] or 'no value'} with accuracy {group['accuracy']:.4f}, "
            line += f"{counted(group['images'], 'image')} (p = {group['p']:.2g}, corrected for the number of groups)"
        lines.append(line)
    return lines


def write_metrics(run: Path, metrics: Mapping[str, object]) -> None:
    """Write metrics.json, which marks the run as finished. NaN and infinity, from a diverged net, become null."""

    def without_nan(value: object) -> object:
        if isinstance(value, dict):
            return {name: without_nan(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [without_nan(inner) for inner in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    write_text(run / "metrics.json", json.dumps(without_nan(metrics), indent=2, ensure_ascii=False) + "\n")


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header, without empty cells; none without the file.

    A line with fewer cells than the header is skipped: it is still being written, or was cut short by a kill or a full
    disk.
    """
    if not file.is_file():
        return []
    rows = []
    with file.open(encoding="utf-8", newline="") as lines:
        for cells in csv.DictReader(lines):
            if None not in cells.values():
                rows.append({name: value for name, value in cells.items() if value})
    return rows


def read_curves(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv."""
    rows = []
    for row in read_rows(run / "metrics.csv"):
        rows.append({name: float(text) for name, text in row.items()})
    return rows
