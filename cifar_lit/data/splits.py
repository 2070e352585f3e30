"""Splits by seed: the test images of a data set that has none, validation images, folds.

All are stratified: each class gives its share. Rows of one group, such as the pictures of one patient or near-duplicates, stay on
one side; then shares are met as well as whole groups allow.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cifar_lit.errors import UsageError
from cifar_lit.text import note


def split_validation(labels: Tensor, val_size: float, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of the train and the validation part, both int64 in ascending order; of `labels`, int64 (N,).

    Every class gives its proportional share (largest remainders first), chosen as a function of `seed`.

    Args:
        labels: int64 (N,).
        val_size: a number of images when 1 or more, else a fraction of them.
        seed: chooses the images.
        groups: int64 (N,), the same number for rows that must not be parted; None where each may stand alone.

    Raises:
        UsageError: where nothing would be left on either side.
    """
    count = len(labels)
    val_count = round(val_size * count) if val_size < 1 else int(val_size)
    if val_size < 0 or val_count >= count:
        raise UsageError(f"data.val_size {val_size:g} must leave some of the {count} images to train on")
    if val_size > 0 and val_count == 0:
        raise UsageError(f"data.val_size {val_size:g} of {count} images is none: raise it, or use 0 to train on all")
    _, numbers, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
    exact = counts * (val_count / count)
    sizes = np.floor(exact).astype(int)
    # those come last that would have none left
    sizes[np.lexsort((sizes - exact, sizes + 1 >= counts))[: val_count - sizes.sum()]] += 1
    rng, order = np.random.default_rng(seed), np.empty(count, np.int64)
    for rows in rows_by_class(numbers, counts):
        order[rng.permutation(rows)] = np.arange(len(rows))
    validation = draw_rows(numbers, sizes, order, None if groups is None else groups.numpy())
    if val_count and not validation.any():
        raise UsageError(
            f"no group of the {count} images can be spared to validate on: use --data.val_size 0, or more groups"
        )
    return torch.from_numpy(np.flatnonzero(~validation)), torch.from_numpy(np.flatnonzero(validation))


def rows_by_class(labels: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """The rows of each class in ascending order. labels: int64 (N,) in [0, classes); counts: how many there are of each."""
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def draw_rows(labels: np.ndarray, sizes: np.ndarray, order: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Which rows are drawn, bool (N,): of each class the first in `order`, as many as `sizes` says.

    Groups of several rows come before the others, the largest first. One is drawn where that brings its classes nearer to their
    shares of the groups so far, and leaves some of each. Rows that stand alone fill up what is missing. A class of which nothing
    was drawn gives its smallest group that leaves some.

    Args:
        labels: int64 (N,), values in [0, classes).
        sizes: int64 (classes,).
        order: int64 (N,), the place of each row among those of its class, or of all.
        groups: int64 (N,), the same number for rows that must not be parted; None where each may stand alone.
    """
    drawn, together = np.zeros(len(labels), bool), list_groups(labels, order, groups)
    totals = np.bincount(labels, minlength=len(sizes)).tolist()
    counts, surplus = [0] * len(sizes), [0.0] * len(sizes)  # of each class; over its share of the groups so far
    share = [size / max(total, 1) for size, total in zip(sizes.tolist(), totals, strict=True)]
    alone = np.ones(len(labels), bool)

    def draw(rows: np.ndarray, members: Mapping[int, int]) -> bool:
        if any(totals[label] - counts[label] <= count for label, count in members.items()):
            return False
        drawn[rows] = True
        for label, count in members.items():
            counts[label] += count
        return True

    for rows, members in together:
        alone[rows] = False
        for label, count in members.items():
            surplus[label] -= share[label] * count
        if further_off(members, surplus, totals) < 0 and draw(rows, members):
            for label, count in members.items():
                surplus[label] += count

    by_class = np.flatnonzero(alone)
    by_class = by_class[np.lexsort((order[by_class], labels[by_class]))]
    own = labels[by_class]
    places = np.arange(len(own)) - np.searchsorted(own, own)
    drawn[by_class[places < (sizes - counts)[own]]] = True
    counts[:] = np.bincount(labels[drawn], minlength=len(sizes)).tolist()
    for rows, members in reversed(together):
        if any(sizes[label] and not counts[label] for label in members):
            draw(rows, members)
    return drawn


def fold_rows(labels: Tensor, groups: Tensor | None, folds: int, seed: int) -> Tensor:
    """The fold of each row for a cross-validation, int64 (N,) in [0, folds).

    Stratified, as even as the classes allow, and a function of `seed`. Groups of several rows come first, the largest at first,
    each to the fold that has the least of its classes, as in scikit-learn's StratifiedGroupKFold. Rows that stand alone are then
    dealt out class by class.

    Args:
        labels: int64 (N,).
        groups: int64 (N,), the same number for rows that must not be parted; None where each may stand alone.
        folds: how many.
        seed: chooses which rows share a fold.

    Raises:
        UsageError: where a fold would be empty.
    """
    units = len(labels) if groups is None else len(groups.unique())
    if not 2 <= folds <= units:
        what = "images" if groups is None else "groups of images"
        raise UsageError(f"{folds} folds of {units:,} {what} cannot be: choose from 2 to {units:,}")
    classes, numbers, class_sizes = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
    totals: list[int] = class_sizes.tolist()
    order = np.random.default_rng(seed).permutation(len(labels))
    result = np.full(len(labels), -1)
    counts, sizes = [[0] * len(classes) for _ in range(folds)], [0] * folds
    for rows, members in list_groups(numbers, order, None if groups is None else groups.numpy()):
        fold = min(range(folds), key=lambda fold: (further_off(members, counts[fold], totals), sizes[fold]))
        result[rows] = fold
        sizes[fold] += len(rows)
        for label, count in members.items():
            counts[fold][label] += count
    few = 0
    for label, rows in enumerate(rows_by_class(numbers, class_sizes)):
        rows = rows[result[rows] < 0]
        heap = [(counts[fold][label], sizes[fold], fold) for fold in range(folds)]
        heapq.heapify(heap)
        for row in rows[np.argsort(order[rows])].tolist():
            count, size, fold = heap[0]
            result[row] = fold
            heapq.heapreplace(heap, (count + 1, size + 1, fold))
        for _, size, fold in heap:
            sizes[fold] = size
        few += min(heap)[0] == 0
    if few:
        note(
            f"{few} of {len(classes)} classes have fewer images, or groups of them, than there are folds: some folds lack them"
        )
    return torch.from_numpy(result)


def further_off(members: Mapping[int, int], surplus: Sequence[float], totals: Sequence[int]) -> float:
    """How much further from 0 a group takes the surpluses of its classes: the change of their squares, in parts of each class."""
    return sum(count * (count + 2 * surplus[label]) / totals[label] ** 2 for label, count in members.items())


def list_groups(
    labels: np.ndarray, order: np.ndarray, groups: np.ndarray | None
) -> list[tuple[np.ndarray, Counter[int]]]:
    """Groups of several rows, the largest first: their rows, and how many of each class.

    Those of like size, up to the double, are in the order of their first rows, so that another seed draws others of them.
    """
    if groups is None:
        return []
    _, numbers, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[numbers] > 1)
    rows = rows[np.lexsort((order[rows], numbers[rows]))]
    parts = np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1) if len(rows) else []
    parts.sort(key=lambda part: (-len(part).bit_length(), order[part[0]], part[0]))
    return [(part, Counter(labels[part].tolist())) for part in parts]


def connect(firsts: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Joins the groups of each pair of rows (left, right), in place.

    firsts: int64 (N,), the first row of each row's group; left, right: int64 (pairs,).
    """
    while len(left):
        left, right = np.minimum(firsts[left], firsts[right]), np.maximum(firsts[left], firsts[right])
        left, right = left[left < right], right[left < right]
        np.minimum.at(firsts, right, left)
        while not np.array_equal(firsts, further := firsts[firsts]):
            firsts[:] = further


def group_files(
    paths: Sequence[str], groups: Mapping[str, str], duplicates: Sequence[Sequence[str]]
) -> np.ndarray | None:
    """The group of each file, int64 (N,): its first row; None where every file stands alone.

    paths: of the files. groups: names of groups, by path. duplicates: paths of pictures that are alike.
    """
    known: dict[tuple[str, str | int], int] = {}
    pairs = [(row, known.setdefault(("group", groups[path]), row)) for row, path in enumerate(paths) if path in groups]
    if duplicates:
        copies = {path: number for number, paths in enumerate(duplicates) for path in paths}
        pairs += [
            (row, known.setdefault(("copy", copies[path]), row)) for row, path in enumerate(paths) if path in copies
        ]
    firsts = np.arange(len(paths))
    connect(firsts, *np.array(pairs, np.int64).reshape(-1, 2).T)
    return None if (firsts == np.arange(len(paths))).all() else firsts
