"""Group runs that differ in their seeds, and compare two groups over equal seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from cifar_lit.base.stats import POSITIVE, SHARE, holm, mean_interval, paired_p
from cifar_lit.runs.compare import SEED, RunRecord, differing, setting_text


class Group(NamedTuple):
    """Tested runs with the same recipe, data and settings, except for the seed and the threads."""

    recipe: str
    settings: dict[str, str]  # only those that differ between groups, as text
    runs: list[str]  # names
    accuracies: dict[str, float]  # by seed, that of its first run; by name those of runs without a seed
    # `stats.mean_interval` over these.
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
    accuracies = {label: run.test["accuracy"] for label, run in firsts.items()}
    seconds = [run.metrics["train_seconds"] for run in firsts.values() if run.metrics.get("train_seconds")]
    return Group(
        recipe=key[0],
        settings=dict(zip(names, key[1:], strict=False)),
        runs=[run.name for run in group],
        accuracies=accuracies,
        accuracy=mean_interval([*accuracies.values()], SHARE),
        train_seconds=mean_interval(seconds, POSITIVE) if seconds else None,
    )


class SeedPairs(NamedTuple):
    """The difference in test accuracy between two groups, paired by seed."""

    first: int  # number of the first group
    second: int
    # `stats.mean_interval` of first minus second for equal seeds, and `p`, `stats.paired_p` of these differences,
    # corrected for the number of pairs (Holm). Other test images are not considered.
    over_seeds: dict[str, Any]


def seed_pairs(groups: Sequence[Group]) -> list[SeedPairs]:
    """Return the difference between each two of `groups` that share at least two seeds."""
    pairs = []
    for first, second in combinations(range(len(groups)), 2):
        one, other = groups[first].accuracies, groups[second].accuracies
        shared = [seed for seed in one if seed in other]
        if len(shared) < 2:
            continue
        differences = [one[seed] - other[seed] for seed in shared]
        over_seeds = mean_interval(differences) | {"p": paired_p(differences)}
        pairs.append(SeedPairs(first, second, over_seeds))
    tested = [pair.over_seeds for pair in pairs if pair.over_seeds["p"] is not None]
    for over_seeds, p in zip(tested, holm([each["p"] for each in tested]), strict=True):
        over_seeds["p"] = p
    return pairs
