"""Splits by seed: test images for a data set without a test set, validation images, folds, and shares.

All splits are stratified. Rows of one group, such as images of one patient or near-duplicates, stay on the same side.
With large groups, the shares of the classes are approximate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import ImageSet

Groups = Tensor | np.ndarray | None  # int64 (N,), equal for rows that must stay together


@dataclass(frozen=True)
class Split:
    """How the images are split into training, validation and test images, besides the size of the validation part.

    Args:
        test_size: fraction of your own images to test on, if the folder or table has no test set.
        seed: seed of the split and of generated images. Runs that differ in their seed share the same test set.
        group: table column, such as patient: images with equal values stay on the same side of every split. Default:
            the column `group`, if the table has one.
        folds: number of stratified folds for cross-validation; 0 for none. The training images are divided into folds,
            or all of your own images if there is no test set. `--folds 5` tests on each fold in turn.
        fold: index of the fold to test on, from 0.
        share: share of the training images to train on, drawn by class.

    Raises:
        UsageError: for invalid values.
    """

    test_size: float = 0.2
    seed: int = 0
    group: str | None = None
    folds: int = 0
    fold: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.test_size < 1:
            raise UsageError(f"data.split.test_size must be between 0 and 1, not {self.test_size:g}")
        if self.folds and self.fold not in range(self.folds):
            fault = f"data.split.fold {self.fold} of data.split.folds {self.folds} is invalid"
            raise UsageError(f"{fault}: folds are counted from 0")
        if not 0 < self.share <= 1:
            fault = f"data.split.share is a share of the training images, above 0 and at most 1, not {self.share:g}"
            raise UsageError(fault)


def split_validation(labels: Tensor, val_size: float, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split rows into training and validation rows, both int64, ascending.

    Each class gives its proportional share of validation images (largest remainders first).

    Args:
        labels: int64 (N,).
        val_size: number of validation images if 1 or more, else their fraction.
        groups: int64 (N,), equal for rows that must stay together.

    Raises:
        UsageError: if either side would be empty.
    """
    count = len(labels)
    val_count = round(val_size * count) if val_size < 1 else int(val_size)
    if val_size < 0 or val_count >= count:
        raise UsageError(f"data.val_size {val_size:g} must leave some of the {count} images to train on")
    _, numbers, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
    exact = counts * (val_count / count)
    sizes = np.floor(exact).astype(int)
    # Classes that would have no training image left come last.
    sizes[np.lexsort((sizes - exact, sizes + 1 >= counts))[: val_count - sizes.sum()]] += 1
    rng = np.random.default_rng(seed)
    order = np.empty(count, np.int64)
    for rows in rows_by_class(numbers, counts):
        order[rng.permutation(rows)] = np.arange(len(rows))
    is_val = draw_rows(numbers, sizes, order, groups)
    if val_size > 0 and not is_val.any():
        fault = f"data.val_size {val_size:g} of {count} images draws no image or group"
        raise UsageError(f"{fault}: raise it, or use 0 to train on all")
    return torch.from_numpy(np.flatnonzero(~is_val)), torch.from_numpy(np.flatnonzero(is_val))


def rows_by_class(labels: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each class, ascending, from int64 labels (N,) and the sizes of the classes."""
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def draw_rows(labels: np.ndarray, sizes: np.ndarray, order: np.ndarray, groups: Groups) -> np.ndarray:
    """Draw the first rows of each class in `order`, keeping groups together; return a mask, bool (N,).

    Groups of several rows come first, in descending size. A group is drawn if the drawn shares of its classes come
    nearer to their targets, and undrawn rows remain in each of them. Single rows then fill up each class. A class
    without any drawn row gives its smallest group that leaves undrawn rows.

    Args:
        labels: int64 (N,), values in [0, classes).
        sizes: int64 (classes,), number of rows to draw.
        order: int64 (N,), position of each row within its class, or among all rows.
        groups: int64 (N,), equal for rows that must stay together.
    """
    drawn = np.zeros(len(labels), bool)
    is_single = np.ones(len(labels), bool)
    totals = np.bincount(labels, minlength=len(sizes)).tolist()
    shares = [size / max(total, 1) for size, total in zip(sizes.tolist(), totals, strict=True)]
    counts = [0] * len(sizes)  # drawn rows of each class
    surplus = [0.0] * len(sizes)  # drawn rows over the share of the groups so far

    def draw(rows: np.ndarray, class_counts: Mapping[int, int]) -> bool:
        """Draw a group unless one of its classes would have no row left. Return whether it was drawn."""
        for label, count in class_counts.items():
            if totals[label] - counts[label] <= count:
                return False
        drawn[rows] = True
        for label, count in class_counts.items():
            counts[label] += count
        return True

    large_groups = list_groups(labels, order, groups)
    for rows, class_counts in large_groups:
        is_single[rows] = False
        for label, count in class_counts.items():
            surplus[label] -= shares[label] * count
        if imbalance_change(class_counts, surplus, totals) >= 0:
            continue
        if draw(rows, class_counts):
            for label, count in class_counts.items():
                surplus[label] += count

    singles = np.flatnonzero(is_single)
    singles = singles[np.lexsort((order[singles], labels[singles]))]
    single_labels = labels[singles]
    positions = np.arange(len(singles)) - np.searchsorted(single_labels, single_labels)  # within each class
    drawn[singles[positions < (sizes - counts)[single_labels]]] = True
    counts[:] = np.bincount(labels[drawn], minlength=len(sizes)).tolist()
    for rows, class_counts in reversed(large_groups):
        if any(sizes[label] and not counts[label] for label in class_counts):
            draw(rows, class_counts)
    return drawn


def fold_rows(labels: Tensor, groups: Tensor | None, folds: int, seed: int) -> Tensor:
    """Return the fold of each row for a cross-validation, int64 (N,) in [0, folds).

    Folds are stratified, and as even as the classes allow. As in scikit-learn's StratifiedGroupKFold, groups of several
    rows come first, in descending size. Each group goes to the fold with the fewest images of its classes. Single rows
    are then distributed class by class.

    Args:
        labels: int64 (N,).
        groups: int64 (N,), equal for rows that must stay together.

    Raises:
        UsageError: if a fold would be empty.
    """
    units, noun = len(labels), "images"
    if groups is not None:
        units, noun = len(groups.unique()), "groups of images"
    if not 2 <= folds <= units:
        raise UsageError(f"{folds} folds of {units:,} {noun} are invalid: choose from 2 to {units:,}")
    classes, numbers, class_sizes = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
    totals: list[int] = class_sizes.tolist()
    order = np.random.default_rng(seed).permutation(len(labels))
    result = np.full(len(labels), -1)
    counts = [[0] * len(classes) for _ in range(folds)]
    sizes = [0] * folds
    for rows, class_counts in list_groups(numbers, order, groups):
        fold = min(range(folds), key=lambda fold: (imbalance_change(class_counts, counts[fold], totals), sizes[fold]))
        result[rows] = fold
        sizes[fold] += len(rows)
        for label, count in class_counts.items():
            counts[fold][label] += count
    for label, rows in enumerate(rows_by_class(numbers, class_sizes)):
        rows = rows[result[rows] < 0]
        for row in rows[np.argsort(order[rows])].tolist():
            fold = min(range(folds), key=lambda fold: (counts[fold][label], sizes[fold]))
            result[row] = fold
            sizes[fold] += 1
            counts[fold][label] += 1
    return torch.from_numpy(result)


def imbalance_change(class_counts: Mapping[int, int], surplus: Sequence[float], totals: Sequence[int]) -> float:
    """Return by how much a group increases the sum of squared relative surpluses of its classes."""
    change = 0.0
    for label, count in class_counts.items():
        change += count * (count + 2 * surplus[label]) / totals[label] ** 2
    return change


def list_groups(labels: np.ndarray, order: np.ndarray, groups: Groups) -> list[tuple[np.ndarray, Counter[int]]]:
    """Return the rows and class counts of each group of several rows, the largest first.

    Groups of similar size, up to a factor of 2, are in the order of their first rows, so that they vary with the seed.
    """
    if groups is None:
        return []
    _, numbers, counts = np.unique(groups, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[numbers] > 1)
    if not len(rows):
        return []
    rows = rows[np.lexsort((order[rows], numbers[rows]))]
    parts = np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1)
    parts.sort(key=lambda part: (-len(part).bit_length(), order[part[0]], part[0]))
    return [(part, Counter(labels[part].tolist())) for part in parts]


def connect(firsts: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Join the groups of each pair of rows (left, right), int64 (pairs,), in place.

    Args:
        firsts: int64 (N,), the first row of each row's group.
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
    """Return the first row of each file's group, int64 (N,), or None if every group is a single file.

    groups: names of groups, by path. duplicates: paths of each set of near-duplicates.
    """
    copies: dict[str, int] = {}
    for number, same in enumerate(duplicates):
        copies |= dict.fromkeys(same, number)
    pairs: list[tuple[int, int]] = []  # a row, and the first row of the same group or copy
    for keys in (groups, copies):
        first_rows: dict[str | int, int] = {}
        for row, path in enumerate(paths):
            if path in keys:
                pairs.append((row, first_rows.setdefault(keys[path], row)))
    firsts = np.arange(len(paths))
    connect(firsts, *np.array(pairs, np.int64).reshape(-1, 2).T)
    if (firsts == np.arange(len(paths))).all():
        return None
    return firsts


def take_share(images: ImageSet, rows: Tensor, share: float, seed: int) -> Tensor:
    """Return a share of `rows`, int64, in their order.

    Every class keeps about this share of its images, and at least one image or group. Groups stay whole. share: above 0
    and at most 1.
    """
    if share == 1:
        return rows
    labels = images.labels[rows].numpy()
    sizes = np.maximum(np.round(share * np.bincount(labels)), 1).astype(int)
    order = np.random.default_rng(seed).permutation(len(rows))
    is_taken = draw_rows(labels, sizes, order, images.groups_of(rows))
    return rows[torch.from_numpy(is_taken)]
