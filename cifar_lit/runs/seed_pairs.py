"""Compare two groups of runs over their seeds and over the test images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from cifar_lit.runs.compare import Hits
from cifar_lit.stats import Z95, mean_interval, t_quantile


class SeedPairs(NamedTuple):
    """The difference in test accuracy between two groups, paired by seed.

    Attributes:
        first: number of the first group.
        second: number of the second group.
        over_seeds: `stats.mean_interval` of first minus second for equal seeds. Other test images are not considered.
        over_images: interval of the mean difference over test images like these, for these trained nets; None if the
            predictions are missing or the test images differ.
    """

    first: int
    second: int
    over_seeds: dict[str, Any]
    over_images: tuple[float, float] | None

    def seeds_for(self, difference: float) -> int:
        """Return the number of seeds that find a true difference in accuracy with 80 % power at p < 0.05.

        This is the sample size of a paired t test for the standard deviation of these differences. It is itself an
        estimate, and rough for few seeds.
        """
        deviation, count = self.over_seeds["std"] / difference, 2
        while (t_quantile(count - 1) + t_quantile(count - 1, 0.6)) * deviation > math.sqrt(count):
            count += 1 + count // 100
        return count


def seed_pairs(groups: Sequence[Mapping[str, Any]], hits: Mapping[str, Hits]) -> list[SeedPairs]:
    """Return the difference between each two groups that share at least two seeds.

    Args:
        groups: as `compare.groups` returns them.
        hits: as `compare.hits_by_run` returns them.
    """
    pairs = []
    for first, second in combinations(range(len(groups)), 2):
        by_seed = [_runs_by_seed(groups[number]) for number in (first, second)]
        shared = [seed for seed in by_seed[0] if seed in by_seed[1]]
        if len(shared) < 2:
            continue
        runs = [[by_seed[side][seed] for seed in shared] for side in (0, 1)]
        differences = [one - other for (_, one), (_, other) in zip(*runs, strict=True)]
        names = [[name for name, _ in side] for side in runs]
        pairs.append(SeedPairs(first, second, mean_interval(differences), _over_images(names[0], names[1], hits)))
    return pairs


def _runs_by_seed(group: Mapping[str, Any]) -> dict[Any, tuple[str, float]]:
    """Return name and accuracy of the first run of each seed."""
    runs: dict[Any, tuple[str, float]] = {}
    for seed, name, accuracy in zip(group["seeds"], group["runs"], group["accuracies"], strict=True):
        runs.setdefault(seed, (name, accuracy))
    return runs


def _over_images(first: Sequence[str], second: Sequence[str], hits: Mapping[str, Hits]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference in correct predictions between these runs."""
    if len({hits[name].fingerprint if name in hits else name for name in (*first, *second)}) > 1:
        return None
    by_image = [zip(*(hits[name].correct for name in side), strict=True) for side in (first, second)]
    differences = [(sum(one) - sum(other)) / len(first) for one, other in zip(*by_image, strict=True)]
    if len(differences) < 2:
        return None
    half = Z95 * statistics.stdev(differences) / math.sqrt(len(differences))
    middle = statistics.fmean(differences)
    return middle - half, middle + half
