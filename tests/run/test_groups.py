"""Results of groups of test images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_lit.base.stats import wilson_interval
from cifar_lit.run.record import group_lines
from cifar_lit.run.results import group_results


def results_of(hits: dict[str, list[bool]], covered: list[bool] | None = None) -> list[dict[str, Any]]:
    """Return the results of the groups of a column `camera`."""
    values = [name for name, each in hits.items() for _ in each]
    is_hit = torch.tensor([hit for each in hits.values() for hit in each])
    return group_results({"camera": values}, is_hit, None if covered is None else torch.tensor(covered))["camera"]


def test_the_worst_group_is_the_one_that_is_surely_bad_and_not_one_of_two_unlucky_images() -> None:
    groups = results_of({"good": [True] * 50, "unlucky": [False] * 2, "bad": [True] * 20 + [False] * 30, "": [True]})
    assert [group["value"] for group in groups] == ["bad", "unlucky", "good", ""]
    assert (groups[0]["images"], groups[0]["accuracy"]) == (50, 0.4)
    assert groups[0]["interval"] == pytest.approx(wilson_interval(20, 50), abs=1e-6)


def test_the_coverage_of_a_group_is_the_share_of_its_images_with_the_true_class_in_their_set() -> None:
    groups = results_of({"east": [True] * 3, "west": [True]}, [True, False, True, False])
    coverage = {group["value"]: group["coverage"] for group in groups}
    assert coverage == {"east": pytest.approx(2 / 3, abs=1e-6), "west": 0}


def test_a_line_names_the_worst_group_and_how_many_are_clearly_below_the_accuracy_of_all() -> None:
    hits = {"": [True] * 8 + [False] * 42, "east": [True] * 60, "west": [True] * 55 + [False] * 5}
    low, high = wilson_interval(8, 50)
    assert group_lines({"accuracy": 123 / 170, "groups": {"camera": results_of(hits)}}) == [
        f"worst of 3 groups by camera: no value with accuracy 0.1600 ({low:.4f} … {high:.4f}), 50 images; "
        "1 of 3 are clearly below 0.7235, and 0.1 would be by chance"
    ]
    assert group_lines({"accuracy": 0.5}) == []
