"""Intervals and tests against values worked by hand or counted out."""

from __future__ import annotations

from itertools import product

import pytest

from cifar_lit.runs.compare import mcnemar, wilson_interval


def test_wilsons_interval_is_that_of_worked_examples() -> None:
    # 5 of 10: middle 0.5, half 1.96 · sqrt(0.025 + 0.0096036) / 1.384146 = 0.26341
    assert wilson_interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-4)
    # none of 10: from 0 to z² / (n + z²) = 3.8415 / 13.8415
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-4)
    low, high = wilson_interval(9400, 10000)  # for many images as the normal's: 0.94 ± 1.96 · 0.0023749
    assert (low, high) == pytest.approx((0.94 - 0.00465, 0.94 + 0.00465), abs=2e-4)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (2, 7), (9, 1), (5, 6)])
def test_mcnemars_p_is_the_share_of_all_ways_to_split(first: int, second: int) -> None:
    """Every way in which the images could have fallen to the one or the other, counted."""
    count = first + second
    splits = [sum(way) for way in product((0, 1), repeat=count)]
    uneven = abs(first - second)
    as_much = sum(abs(2 * split - count) >= uneven for split in splits) / len(splits)
    itself = sum(split == min(first, second) for split in splits) / len(splits)  # its mirror image counts too unless it is even
    found = mcnemar(first, second)
    assert found.exact == pytest.approx(as_much)
    assert found.mid == pytest.approx(as_much - (itself / 2 if first == second and count else 0 if not count else itself))
    assert mcnemar(second, first)[2:] == found[2:]


def test_mcnemar_holds_for_many_images() -> None:
    assert mcnemar(2600, 2400).mid == pytest.approx(0.00468, abs=2e-4)  # the normal's: z = 200 / sqrt(5000) = 2.828
    assert 0 < mcnemar(500, 100).exact < 1e-50
