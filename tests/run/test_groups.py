"""Results of groups of test images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_lit.base.stats import binomial_tail, wilson_interval
from cifar_lit.run.record import group_lines
from cifar_lit.run.results import group_results


def results_of(hits: dict[str, list[bool]]) -> list[dict[str, Any]]:
    """Return the results of the groups of a column `camera`."""
    values = [name for name, each in hits.items() for _ in each]
    is_hit = torch.tensor([hit for each in hits.values() for hit in each])
    return group_results({"camera": values}, is_hit)["camera"]


def test_a_group_that_is_worse_than_all_by_more_than_chance_comes_first_and_no_unlucky_one() -> None:
    groups = results_of({"good": [True] * 50, "unlucky": [False] * 2, "bad": [True] * 20 + [False] * 30, "": [True]})
    assert [group["value"] for group in groups] == ["bad", "", "good", "unlucky"]
    assert (groups[0]["images"], groups[0]["accuracy"]) == (50, 0.4)
    assert groups[0]["interval"] == pytest.approx(wilson_interval(20, 50), abs=1e-6)
    assert groups[0]["p"] == pytest.approx(4 * binomial_tail(20, 50, 71 / 103))
    assert groups[3]["p"] == pytest.approx(3 * (32 / 103) ** 2)  # Holm: the second smallest of four


def test_of_a_thousand_equally_good_patients_none_is_called_worse() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(1000, 8, generator=generator) < 0.98
    groups = results_of({f"patient {number}": row for number, row in enumerate(hits.tolist())})
    assert len(groups) == 1000 and [group["value"] for group in groups[:2]] == ["patient 0", "patient 1"]
    line = "0 of 1,000 groups by camera worse than all images by more than chance"
    assert group_lines({"groups": {"camera": groups}}) == [line]


def test_a_line_names_the_worst_group_and_how_many_are_worse_by_more_than_chance() -> None:
    hits = {"": [True] * 8 + [False] * 42, "east": [True] * 60, "west": [True] * 55 + [False] * 5}
    groups = results_of(hits)
    assert group_lines({"groups": {"camera": groups}}) == [
        "1 of 3 groups by camera worse than all images by more than chance: no value with accuracy 0.1600, 50 images "
        f"(p = {groups[0]['p']:.2g}, corrected for the number of groups)"
    ]
    assert group_lines({"accuracy": 0.5}) == []
