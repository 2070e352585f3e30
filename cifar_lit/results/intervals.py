"""How sure a figure is: intervals of means and of accuracies, and the test of a difference on the same images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


def t_within(t: float, freedom: int) -> float:
    """The probability that Student's t with `freedom` degrees lies between -t and t.

    The finite sums for whole degrees of freedom, Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(3 if odd else 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """The t that Student's t with `freedom` degrees stays within with probability `confidence`, by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < confidence else (low, middle)
    return high


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Number, mean, standard deviation (of the sample) and 95 % interval of the mean (`low`, `high`).

    A single value has no deviation and no interval: these are None.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"n": len(values), "mean": mean, "std": None, "low": None, "high": None}
    std = statistics.stdev(values)
    half = t_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return {"n": len(values), "mean": mean, "std": std, "low": mean - half, "high": mean + half}


Z95 = 1.959964  # the standard normal lies within ± this with probability 0.95


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a fraction of `count` independent images of which `right` were right; count at least 1.

    Wilson's score interval (1927), which stays within 0 … 1 and holds its confidence near both ends.
    """
    share, square = right / count, Z95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


class McNemar(NamedTuple):
    """Two classifiers on the same images. first, second: images that only the one, only the other has right. p: below."""

    first: int
    second: int
    exact: float
    mid: float


def mcnemar(first: int, second: int) -> McNemar:
    """McNemar's test whether two classifiers err equally often, from the images that only one of them has right.

    exact: the two-sided probability of a split at least as uneven as this, if each of these images fell to either with
    probability 1/2. mid: the mid-p value, which counts half of the probability of the split itself; it is less cautious and
    recommended for accuracies (Fagerland, Lydersen and Laake, BMC Medical Research Methodology 13:91, 2013).
    Both in whole numbers, so that they hold for any count.
    """
    count, least = first + second, min(first, second)
    term = below = 1  # binomial coefficients: of `least`, and their sum up to it
    for place in range(1, least + 1):
        term = term * (count - place + 1) // place
        below += term
    if first == second:
        return McNemar(first, second, 1.0, (2**count * 2 - term) / (2**count * 2) if count else 1.0)
    return McNemar(first, second, 2 * below / 2**count, (2 * below - term) / 2**count)
