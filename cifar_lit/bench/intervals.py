"""How sure a mean is: the confidence interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


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
