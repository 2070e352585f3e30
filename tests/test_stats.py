"""Confidence intervals and paired tests equal values computed by hand or by enumeration."""

from __future__ import annotations

import math
import time
from itertools import product

import pytest

from cifar_lit.stats import mcnemar, mean_interval, newcombe_margin, t_quantile, wilson_interval


def test_an_interval_is_mean_plus_and_minus_t_standard_errors() -> None:
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (9, 2.2622), (199, 1.9720)):  # published tables
        assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-5)
    interval = mean_interval([0.90, 0.92, 0.94])
    assert (interval["n"], interval["mean"], interval["std"]) == (3, pytest.approx(0.92), pytest.approx(0.02))
    assert interval["high"] - interval["mean"] == pytest.approx(4.30265 * 0.02 / 3**0.5, rel=1e-5)
    assert interval["mean"] - interval["low"] == pytest.approx(interval["high"] - interval["mean"])
    assert mean_interval([0.9]) == {"n": 1, "mean": 0.9, "std": None, "low": None, "high": None}


@pytest.mark.parametrize(
    ("right", "count", "interval"),
    [
        (5, 10, (0.23659, 0.76341)),  # middle 0.5, half 1.96 · sqrt(0.025 + 0.0096036) / 1.384146 = 0.26341
        (0, 10, (0.0, 0.27753)),  # from 0 to z² / (n + z²) = 3.8415 / 13.8415
        (10, 10, (0.72247, 1.0)),
        (9400, 10000, (0.93518, 0.94449)),  # close to the normal approximation, 0.94 ± 1.96 · 0.0023749
    ],
)
def test_wilsons_interval_equals_worked_examples(right: int, count: int, interval: tuple[float, float]) -> None:
    assert wilson_interval(right, count) == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize(("first", "second"), [(1, 0), (3, 3), (2, 7), (9, 1), (5, 6)])
def test_mcnemars_p_is_the_share_of_splits_at_least_as_uneven(first: int, second: int) -> None:
    splits = [sum(way) for way in product((0, 1), repeat=first + second)]
    exact = sum(abs(2 * split - first - second) >= abs(first - second) for split in splits) / len(splits)
    equal = sum(split in (first, second) for split in splits) / len(splits)
    assert mcnemar(first, second)[2:] == mcnemar(second, first)[2:] == pytest.approx((exact, exact - equal / 2))


def test_mcnemar_is_exact_and_fast_for_no_images_and_for_many() -> None:
    assert mcnemar(0, 0) == (0, 0, 1.0, 1.0)
    assert mcnemar(2600, 2400).mid == pytest.approx(0.00468, abs=2e-4)  # normal approximation: z = 2.828
    assert 0 < mcnemar(500, 100).exact < 1e-50
    began = time.process_time()
    # The probability of an even split of 2n images is 1 / sqrt(πn), by Stirling's formula.
    assert 1 - mcnemar(200_000, 200_000).mid == pytest.approx(0.5 / math.sqrt(math.pi * 200_000), rel=1e-5)
    assert time.process_time() - began < 0.1


def test_newcombes_margin_equals_a_worked_example() -> None:
    # Wilson's interval of 56 of 70 is 0.69183 … 0.87695; the margin is sqrt(0.10817² + 0.07695²).
    assert newcombe_margin(0.8, wilson_interval(56, 70)) == pytest.approx(0.13275, abs=1e-5)
