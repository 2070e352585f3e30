"""Results for groups of test images, such as those of one camera: the columns that `data.groups` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cifar_lit.base.stats import wilson_interval


def group_results(
    columns: Mapping[str, Sequence[str]], hits: Tensor, covered: Tensor | None
) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each value of each column, the worst first.

    The worst has the lowest upper limit of the 95 % interval of its accuracy (Wilson), so that a few unlucky images are
    no bad group.

    Args:
        columns: value of each image by the name of the column.
        hits: whether each prediction is correct, bool (N,).
        covered: whether the prediction set of each image contains the true class, bool (N,); None without sets.
    """
    results = {}
    for name, values in columns.items():
        rows_of: dict[str, list[int]] = {}
        for row, value in enumerate(values):
            rows_of.setdefault(value, []).append(row)
        groups: list[dict[str, Any]] = []
        for value, rows in rows_of.items():
            count, correct = len(rows), int(hits[rows].sum())
            low, high = wilson_interval(correct, count)
            group = {"value": value, "images": count, "accuracy": round(correct / count, 6)}
            group["interval"] = [round(low, 6), round(high, 6)]
            if covered is not None:
                group["coverage"] = round(float(covered[rows].double().mean()), 6)
            groups.append(group)
        results[name] = sorted(groups, key=lambda group: group["interval"][1])
    return results


def group_lines(test: Mapping[str, Any]) -> list[str]:
    """Return a line about the worst group of each column of the `test` part of metrics.json."""
    lines = []
    for name, groups in test.get("groups", {}).items():
        worst, count = groups[0], len(groups)
        low, high = worst["interval"]
        bad = sum(group["interval"][1] < test["accuracy"] for group in groups)
        lines.append(
            f"worst of {count} groups by {name}: {worst['value'] or 'no value'} with accuracy {worst['accuracy']:.4f} "
            f"({low:.4f} … {high:.4f}), {worst['images']:,} images; {bad} of {count} are clearly below "
            f"{test['accuracy']:.4f}, and {0.025 * count:.1f} would be by chance"
        )
    return lines
