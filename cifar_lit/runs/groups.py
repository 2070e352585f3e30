"""Results for groups of test images, such as those of one camera: the columns that `data.groups` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from cifar_lit.runs.figures import expected_calibration_error, reliability
from cifar_lit.stats import wilson_interval

MAX_GROUPS = 200  # groups of a column in metrics.json; a column with a value for each image has no use
COVERED = 0.95  # coverage of the prediction sets
INVALID = (AttributeError, LookupError, TypeError, ValueError)  # from values in somebody else's file


def group_results(
    columns: Mapping[str, Sequence[str]], probabilities: Tensor, labels: Tensor, sets: Tensor | None
) -> dict[str, list[dict[str, object]]]:
    """Return the results of each value of each column, the worst first, at most `MAX_GROUPS`.

    The worst has the lowest upper limit of the 95 % interval of its accuracy (Wilson), so that a few unlucky images are
    no bad group.

    Args:
        columns: value of each image by the name of the column.
        probabilities: (N, classes), at the temperature. labels: int64 (N,).
        sets: prediction sets with coverage `COVERED`, bool (N, classes); None if there are too few held-out images.
    """
    highest, predicted = probabilities.max(1)
    hits = predicted == labels
    results = {}
    for name, values in columns.items():
        rows_of: dict[str, list[int]] = {}
        for row, value in enumerate(values):
            rows_of.setdefault(value, []).append(row)
        groups: list[dict[str, Any]] = []
        for value, numbers in rows_of.items():
            rows = torch.tensor(numbers)
            correct, count = int(hits[rows].sum()), len(rows)
            low, high = wilson_interval(correct, count)
            error = expected_calibration_error(reliability(highest[rows], hits[rows]))
            coverage = None
            if sets is not None:
                coverage = round(float(sets[rows, labels[rows]].double().mean()), 6)
            scores = {"accuracy": round(correct / count, 6), "interval": [round(low, 6), round(high, 6)]}
            groups.append({"value": value, "images": count, **scores, "calibration_error": round(error, 6)})
            groups[-1]["coverage"] = coverage
        groups.sort(key=lambda group: group["interval"][1])
        results[name] = groups[:MAX_GROUPS]
    return results


def group_lines(test: Mapping[str, Any]) -> list[str]:
    """Return a line about the worst group of each column of the `test` part of metrics.json, none for invalid ones."""
    lines = []
    with suppress(*INVALID):
        for name, rows in group_rows(test).items():
            count = len(rows)
            value, images, accuracy, limits, *_ = rows[0]
            bad = sum(group["interval"][1] < test["accuracy"] for group in test["groups"][name])
            worst = f"worst of {count} groups by {name}: {value} with accuracy {accuracy} ({limits}), {images} images"
            chance = f"{0.025 * count:.1f} would be by chance"
            lines.append(f"{worst}; {bad} of {count} are clearly below {test['accuracy']:.4f}, and {chance}")
    return lines


def group_rows(test: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return the rows of a table for each column of the `test` part of metrics.json; none for invalid values."""
    tables = {}
    with suppress(*INVALID):
        for name, groups in (test.get("groups") or {}).items():
            rows = []
            for group in groups[:MAX_GROUPS]:
                low, high = group["interval"]
                cells = [group["value"] or "no value", f"{group['images']:,}", f"{group['accuracy']:.4f}"]
                cells += [f"{low:.4f} … {high:.4f}", f"{group['calibration_error']:.4f}", "–"]
                if group["coverage"] is not None:
                    cells[-1] = f"{100 * group['coverage']:.1f} %"
                rows.append(cells)
            if rows:
                tables[name] = rows
    return tables
