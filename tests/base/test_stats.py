"""Confidence intervals and paired tests equal values computed by hand or by enumeration."""

from __future__ import annotations

import math
from itertools import product

import pytest

from cifar_lit.base.stats import binomial_tail, holm, mcnemar, mean_interval, paired_p, t_quantile, wilson_interval


def test_an_interval_is_mean_plus_and_minus_t_standard_errors() -> None:
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (9, 2.2622), (199, 1.9720)):  # published tables
        assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-5)
    interval = mean_interval([0.90, 0.92, 0.94])
    assert (interval["n"], interval["mean"], interval["std"]) == (3, pytest.approx(0.92), pytest.approx(0.02))
    assert interval["high"] - interval["mean"] == pytest.approx(4.30265 * 0.02 / 3**0.5, rel=1e-5)
    assert interval["mean"] - interval["low"] == pytest.approx(interval["high"] - interval["mean"])
    assert mean_interval([0.9]) == {"n": 1, "mean": 0.9, "std": None, "low": None, "high": None}


@pytest.mark.parametrize("values", [[0.5, 0.7], [0.8, 0.8, 0.8], [0.8 - 0.7, 0.9 - 0.8, 0.7 - 0.6]])
def test_two_values_and_equal_values_have_no_interval_and_no_verdict(values: list[float]) -> None:
    interval = mean_interval(values)
    assert interval["low"] is interval["high"] is None and interval["std"] is not None
    assert paired_p(values) is None


def test_an_interval_is_cut_off_at_the_limits_of_its_values() -> None:
    for values in ([0.98, 0.99, 1.0], [0.02, 0.01, 0.0]):
        unlimited, limited = mean_interval(values), mean_interval(values, (0.0, 1.0))
        assert (limited["low"], limited["high"]) == (max(0.0, unlimited["low"]), min(1.0, unlimited["high"]))
        assert not 0 <= unlimited["low"] <= unlimited["high"] <= 1


def test_a_p_value_needs_more_than_the_rounding_to_whole_test_images() -> None:
    # Student's t of 0.01, 0.02 and 0.06 is 1.964 with two degrees of freedom: p = 1 - t / sqrt(t² + 2). With the
    # variance 0.01² / 12 of rounding to multiples of 0.01, t is 1.952.
    assert paired_p([0.01, 0.02, 0.06]) == paired_p([-0.01, -0.02, -0.06]) == pytest.approx(0.19014, abs=1e-5)
    assert paired_p([0.011, 0.012, 0.014]) < 0.05 < paired_p([0.011, 0.012, -0.014])
    # Student's t is 2.646 and its quantile 2.365; with the variance 1/12 of rounding, t is 2.33.
    assert paired_p([0.01] * 4 + [0.0] * 4) > 0.05
    assert paired_p([0.01] * 5 + [0.0] * 3) < 0.05  # t is 3.16 with it


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
def test_mcnemars_p_counts_equally_uneven_splits_by_half(first: int, second: int) -> None:
    splits = [abs(2 * sum(way) - first - second) for way in product((0, 1), repeat=first + second)]
    p = sum((split >= abs(first - second)) + (split > abs(first - second)) for split in splits) / 2 / len(splits)
    assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(p)


def test_mcnemar_is_exact_for_no_images_and_for_many() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(2600, 2400) == pytest.approx(0.00468, abs=2e-4)  # normal approximation: z = 2.828
    assert 0 < mcnemar(500, 100) < 1e-50


def test_the_probability_of_few_correct_images_is_that_of_all_their_draws() -> None:
    draws = [(sum(way), math.prod(0.7 if hit else 0.3 for hit in way)) for way in product((0, 1), repeat=6)]
    for right in range(7):
        assert binomial_tail(right, 6, 0.7) == pytest.approx(sum(p for hits, p in draws if hits <= right))
    assert binomial_tail(7, 8, 0.98) == pytest.approx(1 - 0.98**8)
    assert (binomial_tail(3, 3, 1.0), binomial_tail(0, 3, 0.0)) == (1, 1)


def test_holms_correction_multiplies_by_the_number_of_larger_values_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1, 1] and holm([]) == []
