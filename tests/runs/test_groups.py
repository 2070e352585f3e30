"""Results of groups of test images: their order, their text, and damaged ones in the files of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cifar_lit.runs.groups import MAX_GROUPS, group_lines, group_results, group_rows
from cifar_lit.runs.report import coverage_rows
from cifar_lit.runs.results import write_metrics
from cifar_lit.stats import wilson_interval


def results_of(hits: dict[str, list[bool]], sets: Tensor | None = None) -> list[dict[str, Any]]:
    """Return the results of the groups of a column `camera`. Predictions have the probability 0.75."""
    values = [name for name, each in hits.items() for _ in each]
    is_hit = torch.tensor([hit for each in hits.values() for hit in each])
    labels = torch.arange(len(values)) % 2
    predicted = torch.where(is_hit, labels, 1 - labels)
    probabilities = torch.full((len(values), 2), 0.25, dtype=torch.float64).scatter(1, predicted[:, None], 0.75)
    return group_results({"camera": values}, probabilities, labels, sets)["camera"]


def test_the_worst_group_is_the_one_that_is_surely_bad_and_not_one_of_two_unlucky_images() -> None:
    groups = results_of({"good": [True] * 50, "unlucky": [False] * 2, "bad": [True] * 20 + [False] * 30, "": [True]})
    assert [group["value"] for group in groups] == ["bad", "unlucky", "good", ""]
    bad = groups[0]
    assert (bad["images"], bad["accuracy"], bad["coverage"]) == (50, 0.4, None)
    assert bad["interval"] == pytest.approx(wilson_interval(20, 50), abs=1e-6)
    assert bad["calibration_error"] == pytest.approx(0.35) and groups[2]["calibration_error"] == pytest.approx(0.25)


def test_the_coverage_of_a_group_is_the_share_of_its_images_with_the_true_class_in_their_set() -> None:
    sets = torch.tensor([[True, False], [True, True], [False, True], [True, False]])  # labels 0, 1, 0, 1
    groups = results_of({"east": [True] * 3, "west": [True]}, sets)
    assert {group["value"]: group["coverage"] for group in groups} == {
        "east": pytest.approx(2 / 3, abs=1e-6),
        "west": 0,
    }


def test_the_results_of_a_diverged_net_are_valid_json(tmp_path: Path) -> None:
    groups = group_results({"camera": ["east"]}, torch.full((1, 2), torch.nan).double(), torch.tensor([0]), None)
    write_metrics(tmp_path, {"test": {"groups": groups}})
    written = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert written["test"]["groups"]["camera"][0]["calibration_error"] is None


def test_a_column_with_a_value_for_each_image_has_the_worst_groups_only() -> None:
    groups = results_of({**{f"{number}": [True] for number in range(MAX_GROUPS)}, "bad": [False]})
    assert len(groups) == MAX_GROUPS and groups[0]["value"] == "bad"


def test_a_line_names_the_worst_group_and_how_many_are_clearly_below_the_accuracy_of_all() -> None:
    hits = {"": [True] * 8 + [False] * 42, "east": [True] * 60, "west": [True] * 55 + [False] * 5}
    test = {"accuracy": 123 / 170, "groups": {"camera": results_of(hits), "none": []}}
    low, high = wilson_interval(8, 50)
    assert group_lines(test) == [
        f"worst of 3 groups by camera: no value with accuracy 0.1600 ({low:.4f} … {high:.4f}), 50 images; "
        "1 of 3 are clearly below 0.7235, and 0.1 would be by chance"
    ]
    assert [row[0] for row in group_rows(test)["camera"]] == ["no value", "west", "east"]
    assert group_rows(test)["camera"][0][1:4] == ["50", "0.1600", f"{low:.4f} … {high:.4f}"]
    assert group_lines({"accuracy": 0.5}) == group_lines({}) == []


GROUP = results_of({"east": [True] * 9 + [False]})[0]
DAMAGED = [5, "x", [1], {"camera": 5}, {"camera": {"a": 1}}, {"camera": [5]}, {"camera": [{}]}] + [
    {"camera": [{**GROUP, name: value}]}
    for name, value in (
        ("interval", None), ("interval", [0.5]), ("interval", ["a", "b"]),
        ("accuracy", None), ("images", "many"), ("calibration_error", None), ("coverage", "all"),
    )
]  # fmt: skip


@pytest.mark.parametrize("groups", DAMAGED)
def test_damaged_groups_of_others_have_no_table_and_no_line(groups: Any) -> None:
    test = {"accuracy": 0.5, "groups": groups}
    assert group_rows(test) == {} and group_lines(test) == []


def test_groups_without_an_accuracy_of_all_images_have_no_line() -> None:
    assert group_lines({"accuracy": None, "groups": {"camera": [GROUP]}}) == []
    assert group_lines({"groups": {"camera": [GROUP]}}) == []


LEVEL = {"coverage": 0.9, "measured": 0.91, "set_size": 1.25, "per_class": {"cat": [0.99, 1.0], "dog": [0.8, 1.5]}}


def test_the_table_of_prediction_sets_has_all_images_first_and_then_the_class_with_the_lowest_coverage() -> None:
    other = {**LEVEL, "coverage": 0.99, "per_class": {"cat": [0.5, 1], "dog": [1, 2]}}
    assert coverage_rows({"coverage": [LEVEL, other]}) == [
        ["", "90 %", "99 %"],
        ["all images", "91.0 % · 1.25", "91.0 % · 1.25"],
        ["cat", "99.0 % · 1.00", "50.0 % · 1.00"],
        ["dog", "80.0 % · 1.50", "100.0 % · 2.00"],
    ]
    assert coverage_rows({}) == coverage_rows({"coverage": []}) == []


@pytest.mark.parametrize(
    "coverage",
    [
        5, "x", {"a": 1}, [5], [{}], [LEVEL, 5], [{**LEVEL, "per_class": 5}], [{**LEVEL, "per_class": {"cat": [1]}}],
        [{**LEVEL, "measured": None}], [{**LEVEL, "measured": "x"}], [{**LEVEL, "coverage": "x"}],
        [LEVEL, {**LEVEL, "per_class": {"emu": [1, 2]}}],
    ],
)  # fmt: skip
def test_damaged_coverage_of_others_has_no_table(coverage: Any) -> None:
    assert coverage_rows({"coverage": coverage}) == []
