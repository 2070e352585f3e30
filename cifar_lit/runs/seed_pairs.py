"""Compare two groups of runs over their seeds and over the test images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from cifar_lit.base.stats import MIN_VALUES, Z95, image_interval, mean_interval, t_quantile, verdict
from cifar_lit.runs.compare import Hits

Z80 = 0.841621  # a standard normal variable is below this value with probability 0.8
MANY = 1000  # seeds from which the t and normal distributions give nearly the same number


class SeedPairs(NamedTuple):
    """The difference in test accuracy between two groups, paired by seed."""

    first: int  # number of the first group
    second: int
    # `stats.mean_interval` of first minus second for equal seeds, and `verdict`, `stats.verdict` of these differences.
    # Other test images are not considered.
    over_seeds: dict[str, Any]
    # Interval of the mean difference over test images like these, for these trained nets; None if the predictions are
    # missing or the test images differ.
    over_images: tuple[float, float] | None

    def seeds_for(self, difference: float) -> int:
        """Return the number of seeds that find a true difference in accuracy with 80 % power at p < 0.05.

        This is the sample size of a paired t test for the standard deviation of these differences. It is itself an
        estimate, and rough for few seeds.
        """
        deviation = self.over_seeds["std"] / difference
        count = max(MIN_VALUES, math.ceil(((Z95 + Z80) * deviation) ** 2))  # exceeded for few seeds only
        while count < MANY and (t_quantile(count - 1) + t_quantile(count - 1, 0.6)) * deviation > math.sqrt(count):
            count += 1
        return count


def seed_pairs(groups: Sequence[Mapping[str, object]], hits: Mapping[str, Hits]) -> list[SeedPairs]:
    """Return the difference between each two of `compare.groups` that share at least two seeds."""
    pairs = []
    for first, second in combinations(range(len(groups)), 2):
        one, other = _runs_by_seed(groups[first]), _runs_by_seed(groups[second])
        shared = [seed for seed in one if seed in other]
        if len(shared) < 2:
            continue
        differences = [one[seed][1] - other[seed][1] for seed in shared]
        over_seeds = mean_interval(differences) | {"verdict": verdict(differences)}
        over_images = _over_images([one[seed][0] for seed in shared], [other[seed][0] for seed in shared], hits)
        pairs.append(SeedPairs(first, second, over_seeds, over_images))
    return pairs


def _runs_by_seed(group: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return name and accuracy of the first run of each known seed. A damaged run may have any value as its seed."""
    runs: dict[str, tuple[str, float]] = {}
    for seed, name, accuracy in zip(group["seeds"], group["runs"], group["accuracies"], strict=True):
        if seed is not None:
            runs.setdefault(str(seed), (name, accuracy))
    return runs


def _over_images(first: Sequence[str], second: Sequence[str], hits: Mapping[str, Hits]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference in correct predictions between these runs."""
    tests = set()
    for name in (*first, *second):
        if name not in hits:
            return None
        tests.add((hits[name].fingerprint, len(hits[name].correct)))
    if len(tests) > 1:
        return None
    right = np.array([hits[name].correct for name in first], dtype=float).sum(0)
    other = np.array([hits[name].correct for name in second], dtype=float).sum(0)
    return image_interval(((right - other) / len(first)).tolist())
