"""Confidence intervals of means and fractions, and tests of differences between trainings, classifiers and groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Z95 = 1.959964  # a standard normal variable lies within ± this value with probability 0.95
MIN_VALUES = 3  # values of an interval and a verdict; the spread of two is one difference, which may be 0 by chance
SAME = 1e-9  # values that differ by less are equal up to the rounding of floating-point numbers
ANY = (-math.inf, math.inf)
SHARE = (0.0, 1.0)  # limits of accuracies
POSITIVE = (0.0, math.inf)  # limits of losses and times
SIGNIFICANT = 0.05  # differences with a smaller p value are reported


def _t_within(freedom: int, angle: float) -> float:
    """Return the probability that Student's t lies in -t … t with t = tan(angle) · sqrt(freedom).

    For integer degrees of freedom, it is a finite sum. See M. Abramowitz and I. Stegun, Handbook of Mathematical
    Functions, 1964, 26.7.3 and 26.7.4.
    """
    odd = freedom % 2
    term = math.cos(angle) ** odd
    total = 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    within = math.sin(angle) * total
    if odd:
        within = 2 / math.pi * (angle + within)
    return within


def t_quantile(freedom: int) -> float:
    """Return t so that a variable of Student's distribution lies in -t … t with probability 0.95.

    freedom: degrees of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        if _t_within(freedom, angle) < 0.95:
            low = angle
        else:
            high = angle
    return math.tan(high) * math.sqrt(freedom)


def mean_interval(values: Sequence[float], limits: tuple[float, float] = ANY) -> dict[str, Any]:
    """Return the mean of a sample with its 95 % interval by Student's t (The Probable Error of a Mean, 1908).

    Args:
        values: at least one.
        limits: the least and the greatest possible mean. The interval is cut off there.

    Returns:
        `n`, `mean`, `std` (of the sample), `low` and `high`. `std` is None for a single value. `low` and `high` are
        None for fewer than `MIN_VALUES` and for equal values, whose spread is unknown.
    """
    mean = statistics.fmean(values)
    std = low = high = None
    if len(values) > 1:
        std = statistics.stdev(values)
        if _has_spread(values):
            half = t_quantile(len(values) - 1) * std / math.sqrt(len(values))
            low = max(mean - half, limits[0])
            high = min(mean + half, limits[1])
    return {"n": len(values), "mean": mean, "std": std, "low": low, "high": high}


def limits_text(interval: Mapping[str, Any], form: str = ".4f", unit: float = 1.0) -> str:
    """Return `low … high` of a `mean_interval`, divided by a unit; empty if there is no interval."""
    if interval["low"] is None:
        return ""
    return f"{interval['low'] / unit:{form}} … {interval['high'] / unit:{form}}"


def _has_spread(values: Sequence[float]) -> bool:
    return len(values) >= MIN_VALUES and max(values) - min(values) >= SAME


def paired_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p value of a t test of paired differences; None if they are too few, or all equal.

    Accuracies are multiples of 1 / images, so the differences of a few seeds can be equal by chance, and a plain t test
    finds too many. The smallest gap between different values is taken as that unit, and the variance of rounding to it,
    gap² / 12, is added (W. Sheppard, 1898). Differences that are no multiples have small gaps, which change little.
    """
    if not _has_spread(differences):
        return None
    gaps = [high - low for low, high in pairwise(sorted(differences)) if high - low >= SAME]
    variance = statistics.variance(differences) + min(gaps) ** 2 / 12
    freedom = len(differences) - 1
    t = abs(statistics.fmean(differences)) / math.sqrt(variance / len(differences))
    return max(0.0, 1 - _t_within(freedom, math.atan(t / math.sqrt(freedom))))


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction (E. B. Wilson, Probable Inference, the Law of Succession, 1927).

    right: number of correct images. count: number of independent images, at least one.
    """
    share, square = right / count, Z95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def binomial_tail(right: int, count: int, share: float) -> float:
    """Return the probability of at most `right` correct images of `count`, if the accuracy is `share` (0 … 1)."""
    if right == count or share == 0:
        return 1.0
    total = 0.0
    for number in range(right + 1):
        ways = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
        total += math.exp(ways + number * math.log(share) + (count - number) * math.log1p(-share))
    return min(1.0, total)


def mcnemar(first: int, second: int) -> float:
    """Test whether two classifiers err equally often on the same images (Q. McNemar, Psychometrika 12, 1947).

    Args:
        first: number of images that only the first classifier has right.
        second: number of images that only the second has right.

    Returns:
        The two-sided mid-p value: the probability of a more uneven split, if each of these images falls to either
        classifier with probability 1/2, and half of that of an equally uneven one. It is recommended for accuracies (M.
        Fagerland, S. Lydersen and P. Laake, BMC Medical Research Methodology 13:91, 2013).
    """
    count = first + second
    smaller = min(first, second)
    if not count:
        return 1.0
    below = binomial_tail(smaller - 1, count, 0.5)
    observed = binomial_tail(smaller, count, 0.5) - below
    if first == second:
        observed /= 2
    return 2 * below + observed


def holm(values: Sequence[float]) -> list[float]:
    """Return p values of several tests, corrected for their number (S. Holm, Scandinavian Journal of Statistics, 1979).

    Of any number of tests without an effect, one or more have a corrected value below 0.05 with a probability of at
    most 0.05.
    """
    corrected = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected
