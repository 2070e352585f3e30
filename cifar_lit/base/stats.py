"""Confidence intervals of means and fractions, and the paired test of two classifiers on the same images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Z95 = 1.959964  # a standard normal variable lies within ± this value with probability 0.95
MIN_VALUES = 3  # values of an interval and a verdict; the spread of two is one difference, which may be 0 by chance
SAME = 1e-9  # values that differ by less are equal up to the rounding of floating-point numbers
ANY = (-math.inf, math.inf)
SHARE = (0.0, 1.0)  # limits of accuracies


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Return the two-sided quantile t of Student's distribution: a variable lies in -t … t with this `confidence`.

    For integer degrees of freedom, the probability is a finite sum over the angle atan(t / sqrt(freedom)). See M.
    Abramowitz and I. Stegun, Handbook of Mathematical Functions, 1964, 26.7.3 and 26.7.4. The angle is found by
    bisection.

    freedom: degrees of freedom, at least 1. confidence: two-sided probability, between 0 and 1.
    """
    odd = freedom % 2
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        term = math.cos(angle) ** odd
        total = 0.0
        for power in range(2 + odd, freedom + 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (power - 1) / power
        within = math.sin(angle) * total
        if odd:
            within = 2 / math.pi * (angle + within)
        if within < confidence:
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


def verdict(differences: Sequence[float]) -> str:
    """Return whether the mean of paired differences is significant by a t test at p < 0.05, or why there is no verdict.

    Accuracies are multiples of 1 / images, so the differences of a few seeds can be equal by chance, and a plain t test
    finds too many. The smallest gap between different values is taken as that unit, and the variance of rounding to it,
    gap² / 12, is added (W. Sheppard, 1898). Differences that are no multiples have small gaps, which change little.
    """
    if len(differences) < MIN_VALUES:
        return f"no verdict from fewer than {MIN_VALUES} seeds"
    if not _has_spread(differences):
        return "no verdict, because all differences are equal"
    gaps = [high - low for low, high in pairwise(sorted(differences)) if high - low >= SAME]
    variance = statistics.variance(differences) + min(gaps) ** 2 / 12
    half = t_quantile(len(differences) - 1) * math.sqrt(variance / len(differences))
    if abs(statistics.fmean(differences)) > half:
        return "significant"
    return "not significant"


def image_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over test images; None for fewer than `MIN_VALUES` and for equal values."""
    if not _has_spread(differences):
        return None
    half = Z95 * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) - half, statistics.fmean(differences) + half


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a fraction (E. B. Wilson, Probable Inference, the Law of Succession, 1927).

    right: number of correct images. count: number of independent images, at least one.
    """
    share, square = right / count, Z95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


class McNemar(NamedTuple):
    """Result of `mcnemar`: numbers of images that only the first or second classifier has right, and two p-values."""

    first: int
    second: int
    exact: float
    mid: float


def mcnemar(first: int, second: int) -> McNemar:
    """Test whether two classifiers err equally often on the same images (Q. McNemar, Psychometrika 12, 1947).

    Returns:
        `exact` is the two-sided probability of a split at least as uneven, if each of these images falls to either
        classifier with probability 1/2. `mid` is the mid-p value, which counts only half of the probability of the
        observed split. The mid-p value is less conservative and recommended for accuracies (M. Fagerland, S. Lydersen
        and P. Laake, BMC Medical Research Methodology 13:91, 2013).
    """
    count = first + second
    smaller = min(first, second)
    if not count:
        return McNemar(0, 0, 1.0, 1.0)
    log_ways = math.lgamma(count + 1) - math.lgamma(smaller + 1) - math.lgamma(count - smaller + 1)
    probability = math.exp(log_ways - count * math.log(2))
    term = total = 1.0  # probabilities of splits at least as uneven, relative to this split's
    for right in range(smaller, 0, -1):
        term *= right / (count - right + 1)
        total += term
    exact = min(1.0, 2 * total * probability)
    observed = probability  # the split as it is, on either side
    if first == second:
        observed = probability / 2
    return McNemar(first, second, exact, exact - observed)
