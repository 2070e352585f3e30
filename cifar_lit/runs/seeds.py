"""Group runs that differ in their seeds, and compare two groups over seeds and over test images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from cifar_lit.base.stats import POSITIVE, SAME, SHARE, Z95, holm, mean_interval, paired_p
from cifar_lit.runs.compare import SEED, Hits, RunRecord, differing, setting_text


class Group(NamedTuple):
    """Tested runs with the same recipe, data and settings, except for the seed and the threads."""

    recipe: str
    settings: dict[str, str]  # only those that differ between groups, as text
    runs: list[str]  # names, in the order of their seeds and accuracies
    seeds: list[object]
    accuracies: list[float]
    # `stats.mean_interval` over the first run of each seed.
    accuracy: dict[str, Any]
    train_seconds: dict[str, Any] | None


def groups(runs: Sequence[RunRecord]) -> list[Group]:
    """Group the tested runs. If they used different data, `settings` has a number of the data as `data`."""
    tested = [run for run in runs if run.test]
    names = [name for name in differing(tested) if name not in (SEED, "recipe", "threads")]
    numbers: dict[str, str] = {}  # number of each data set, in the order of first use
    for run in tested:
        numbers.setdefault(run.data, str(len(numbers) + 1))
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in tested:
        key = (run.recipe, *(setting_text(run, name) for name in names), numbers[run.data])
        members.setdefault(key, []).append(run)
    if len(numbers) > 1:
        names.append("data")
    return [_summary(names, key, group) for key, group in members.items()]


def _summary(names: Sequence[str], key: Sequence[str], group: Sequence[RunRecord]) -> Group:
    """Return the entry of a group in the result of `groups`. key: its recipe, then its settings."""
    # Runs that repeat a seed say nothing about the spread over seeds. Runs without a seed are independent.
    firsts: dict[str, RunRecord] = {}
    for run in group:
        label = run.name if run.seed is None else str(run.seed)
        firsts.setdefault(label, run)
    accuracies = [run.test["accuracy"] for run in firsts.values()]
    seconds = [run.metrics["train_seconds"] for run in firsts.values() if run.metrics.get("train_seconds")]
    return Group(
        recipe=key[0],
        settings=dict(zip(names, key[1:], strict=False)),
        runs=[run.name for run in group],
        seeds=[run.seed for run in group],
        accuracies=[run.test["accuracy"] for run in group],
        accuracy=mean_interval(accuracies, SHARE),
        train_seconds=mean_interval(seconds, POSITIVE) if seconds else None,
    )


class SeedPairs(NamedTuple):
    """The difference in test accuracy between two groups, paired by seed."""

    first: int  # number of the first group
    second: int
    # `stats.mean_interval` of first minus second for equal seeds, and `p`, `stats.paired_p` of these differences,
    # corrected for the number of pairs (Holm). Other test images are not considered.
    over_seeds: dict[str, Any]
    # Interval of the mean difference over test images like these, for these trained nets; None if the predictions are
    # missing or the test images differ.
    over_images: tuple[float, float] | None


def seed_pairs(groups: Sequence[Group], hits: Mapping[str, Hits]) -> list[SeedPairs]:
    """Return the difference between each two of `groups` that share at least two seeds."""
    pairs = []
    for first, second in combinations(range(len(groups)), 2):
        one, other = _runs_by_seed(groups[first]), _runs_by_seed(groups[second])
        shared = [seed for seed in one if seed in other]
        if len(shared) < 2:
            continue
        differences = [one[seed][1] - other[seed][1] for seed in shared]
        over_seeds = mean_interval(differences) | {"p": paired_p(differences)}
        over_images = _over_images([one[seed][0] for seed in shared], [other[seed][0] for seed in shared], hits)
        pairs.append(SeedPairs(first, second, over_seeds, over_images))
    tested = [pair.over_seeds for pair in pairs if pair.over_seeds["p"] is not None]
    for over_seeds, p in zip(tested, holm([each["p"] for each in tested]), strict=True):
        over_seeds["p"] = p
    return pairs


def _runs_by_seed(group: Group) -> dict[str, tuple[str, float]]:
    """Return name and accuracy of the first run of each known seed. A damaged run may have any value as its seed."""
    runs: dict[str, tuple[str, float]] = {}
    for seed, name, accuracy in zip(group.seeds, group.runs, group.accuracies, strict=True):
        if seed is not None:
            runs.setdefault(str(seed), (name, accuracy))
    return runs


def _over_images(first: Sequence[str], second: Sequence[str], hits: Mapping[str, Hits]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference in correct predictions between these runs."""
    names = {*first, *second}
    if not names <= hits.keys():
        return None
    if len({hits[name].fingerprint for name in names}) > 1:
        return None
    right = np.stack([hits[name].correct for name in first]).sum(0)
    other = np.stack([hits[name].correct for name in second]).sum(0)
    differences = (right - other) / len(first)
    if np.ptp(differences) < SAME:
        return None
    mean, half = float(differences.mean()), Z95 * float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return mean - half, mean + half
