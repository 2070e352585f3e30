"""Splits by seed: test images for a data set without a test set, validation images, folds, and shares.

All splits are stratified. Rows of one group, such as images of one patient or near-duplicates, stay on the same side.
With large groups, the shares of the classes are approximate.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.plugins import part_name
from cifar_lit.base.text import counted, listed, nfc, note_once
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings
from cifar_lit.data.sources import Load, Source, load_images

if TYPE_CHECKING:
    from typing_extensions import Buffer


Groups = Tensor | np.ndarray | None  # int64 (N,), equal for rows that must stay together


def split_validation(labels: Tensor, val_size: float, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split rows into training and validation rows, both int64, ascending.

    Each class gives its proportional share of validation images (largest remainders first).

    Args:
        labels: int64 (N,), or float (N, classes) as in `ImageSet`.
        val_size: number of validation images if 1 or more, else their fraction.
        groups: int64 (N,), equal for rows that must stay together.

    Raises:
        UsageError: if either side would be empty.
    """
    count = len(labels)
    val_count = round(val_size * count) if val_size < 1 else int(val_size)
    if val_size < 0 or val_count >= count:
        raise UsageError(f"data.val_size {val_size:g} must leave some of the {count} images to train on")
    rng = np.random.default_rng(seed)
    if labels.ndim == 2:
        is_val = draw_by_label(labels.numpy(), val_count / count, rng.permutation(count), groups)
    else:
        _, numbers, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
        exact = counts * (val_count / count)
        sizes = np.floor(exact).astype(int)
        # Classes that would have no training image left come last.
        sizes[np.lexsort((sizes - exact, sizes + 1 >= counts))[: val_count - sizes.sum()]] += 1
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
        change = 0.0  # change of the sum of squared relative surpluses
        for label, count in class_counts.items():
            change += count * (count + 2 * surplus[label]) / totals[label] ** 2
        if change >= 0:
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


def draw_by_label(labels: np.ndarray, share: float, order: np.ndarray, groups: Groups) -> np.ndarray:
    """Draw a share of images with several labels, keeping groups together; return a mask, bool (N,).

    By iterative stratification (K. Sechidis, G. Tsoumakas and I. Vlahavas, On the Stratification of Multi-Label Data,
    ECML PKDD 2011): the label with the fewest images left comes first, and each of its images goes to the side that
    lacks more of them, unless it has its share of all images. Images without labels count as one more label.

    Args:
        labels: float (N, classes), 1 for the labels of an image.
        order: int64 (N,), position of each row.
        groups: int64 (N,), equal for rows that must stay together.
    """
    if groups is None:
        groups = np.arange(len(labels))
    _, units = np.unique(groups, return_inverse=True)
    has = np.column_stack([labels == 1, ~(labels == 1).any(1), np.ones(len(labels), bool)])
    counts = np.zeros((units.max(initial=-1) + 1, has.shape[1]))  # labels in each group, and last its images
    np.add.at(counts, units, has)
    place = np.full(len(counts), len(labels))
    np.minimum.at(place, units, order)
    lacking = np.outer((1 - share, share), counts.sum(0))  # still needed by each side
    is_drawn, is_left = np.zeros(len(counts), bool), np.ones(len(counts), bool)
    while is_left.any():
        left = counts[is_left, :-1].sum(0)
        rarest = int(np.where(left > 0, left, np.inf).argmin())
        chosen = np.flatnonzero(is_left & (counts[:, rarest] > 0))
        for unit in chosen[place[chosen].argsort()]:
            side = int(tuple(lacking[1, [rarest, -1]]) > tuple(lacking[0, [rarest, -1]]))
            if lacking[side, -1] <= 0:  # it has its share of images
                side = 1 - side
            lacking[side] -= counts[unit]
            is_drawn[unit] = side
        is_left[chosen] = False
    return is_drawn[units]


def fold_rows(labels: Tensor, groups: Tensor | None, folds: int, seed: int) -> Tensor:
    """Return the fold of each row for a cross-validation, int64 (N,) in [0, folds).

    Each fold but the first is drawn from the rows left as validation rows are, see `split_validation`.

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
    result = torch.zeros(len(labels), dtype=torch.int64)
    rest = torch.arange(len(labels))
    for fold in range(folds - 1, 0, -1):
        rest_groups = None if groups is None else groups[rest]
        left, drawn = split_validation(labels[rest], round(len(rest) / (fold + 1)), seed, rest_groups)
        result[rest[drawn]] = fold
        rest = rest[left]
    return result


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


def take_share(images: ImageSet, rows: Tensor, share: float, seed: int) -> Tensor:
    """Return a share of `rows`, int64, in their order.

    Every class keeps about this share of its images, and at least one image or group. Groups stay whole. share: above 0
    and at most 1.
    """
    if share == 1:
        return rows
    labels = images.labels[rows].numpy()
    order = np.random.default_rng(seed).permutation(len(rows))
    if images.has_several_labels:
        is_taken = draw_by_label(labels, share, order, images.groups_of(rows))
    else:
        sizes = np.maximum(np.round(share * np.bincount(labels)), 1).astype(int)
        is_taken = draw_rows(labels, sizes, order, images.groups_of(rows))
    return rows[torch.from_numpy(is_taken)]


UNUSED, TRAIN, VAL, TEST = range(4)  # sides of a split
SIDES = ("unused", "train", "val", "test")
FEW_VALIDATION_IMAGES = 20  # below this, one image is more than 5 % of the accuracy


class SplitImages:
    """Training, validation and test images of one data set, loaded on first access.

    Args:
        dataset: the data set; see `data.sources.load_images`.
        val_size: number (1 or more) or fraction (below 1) of the training images to validate on.
    """

    def __init__(self, dataset: str | Source | Load, settings: DataSettings, val_size: float = 0.1) -> None:
        self.dataset = dataset
        self.settings = settings
        self.val_size = val_size
        self.folds = settings.split.folds

    @cached_property
    def train_images(self) -> ImageSet:
        """Training and validation images. With `folds`, also the test images."""
        return load_images(self.dataset, self.settings, train=True)

    @cached_property
    def test_images(self) -> ImageSet:
        """Test images."""
        if not self.folds:
            return load_images(self.dataset, self.settings, train=False)
        return self.train_images.subset(self.fold_rows)

    @cached_property
    def fold_rows(self) -> Tensor:
        """Rows of `train_images` that form the test set of this fold, int64."""
        images = self.train_images
        folds = fold_rows(images.labels, images.groups, self.folds, self.settings.split.seed)
        return (folds == self.settings.split.fold).nonzero().flatten()

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """Rows of `train_images` for training and for validation, both int64."""
        images = self.train_images
        rows = torch.arange(len(images))
        if images.val_rows is not None and not self.folds:
            if self.val_size == 0:
                where = self.settings.root or part_name(self.dataset)
                note_once(f"{where}: data.val_size 0 is ignored, because the data set has its own validation images")
            is_val = torch.isin(rows, torch.tensor(images.val_rows))
            train, val = rows[~is_val], rows[is_val]
        else:
            if self.folds:
                rows = rows[~torch.isin(rows, self.fold_rows)]
            labels, groups = images.labels[rows], images.groups_of(rows)
            in_train, in_val = split_validation(labels, self.val_size, self.settings.split.seed, groups)
            wanted = self.val_size if self.val_size >= 1 else self.val_size * len(rows)
            if not wanted / 2 <= len(in_val) <= wanted * 2:
                count = f"{counted(len(in_val), 'validation image')} of {len(rows):,}, not {wanted:.0f}"
                note_once(f"{count}: images of a group stay together, and the groups are large")
            train, val = rows[in_train], rows[in_val]
        return take_share(images, train, self.settings.split.share, self.settings.split.seed), val

    def sides(self) -> Iterator[tuple[ImageSet, Tensor]]:
        """Yield `train_images`, then separate test images if there are any, with the side of each image, int64 (N,)."""
        images, (train, val) = self.train_images, self.split
        sides = torch.full((len(images),), UNUSED)
        sides[train], sides[val] = TRAIN, VAL
        if self.folds:
            sides[self.fold_rows] = TEST
        yield images, sides
        if self.folds:
            return
        try:
            tests = self.test_images
        except Exception:  # a fit needs no test images, and the function of a user may have none
            return
        yield tests, torch.full((len(tests),), TEST)

    def part_names(self) -> list[str]:
        """Return the part of each training image: train, val, test (with `folds`), or unused."""
        _, sides = next(self.sides())
        return [SIDES[side] for side in sides.tolist()]

    @property
    def class_counts(self) -> Tensor:
        """Number of training images of each class, int64 (classes,)."""
        return self.train_images.class_counts(self.split[0])

    def warn_of_few_images(self) -> None:
        """Warn about classes with fewer than two training images, and a small validation set."""
        classes = self.train_images.classes
        few = [name for name, count in zip(classes, self.class_counts.tolist(), strict=True) if count <= 1]
        if few:
            part = f"{len(few):,} of {len(classes):,} classes"
            note_once(f"{part} have fewer than 2 training images ({listed(few)}): add more")
        count = len(self.split[1])
        if 0 < count < FEW_VALIDATION_IMAGES:
            remedy = "raise --data.val_size, or set it to 0 to train on all images and keep the last checkpoint"
            note_once(f"the best epoch is chosen on {counted(count, 'validation image')} only: {remedy}")


HASHED_BYTES = 4 << 30  # bytes of all images; larger data sets, which exceed many memories, are identified by path only
SKIPPED = TEST + 1  # side of unreadable images

Row = tuple[str, int, int]  # path, side, and hash of class and pixels
Record = dict[str, object]


def split_record(parts: SplitImages) -> Record:
    """Return the record of a split: `digest`, and if the images have names, `rows` as compressed JSON, uint8 (N,)."""
    text = json.dumps(split_rows(parts)).encode()
    record: Record = {"digest": sha256(text).hexdigest()}
    if parts.train_images.names:
        record["rows"] = torch.frombuffer(bytearray(zlib.compress(text)), dtype=torch.uint8)
    return record


def split_rows(parts: SplitImages) -> list[Row]:
    """Return a row for each image. The separate test images of a data set without names cannot change sides."""
    record = [(nfc(name), SKIPPED, 0) for name in parts.train_images.skipped]
    for images, sides in parts.sides():
        names = images.names or [str(row) for row in range(len(images))]
        codes = label_hashes(images)
        if images.images.nbytes <= HASHED_BYTES:
            codes = codes ^ image_hashes(images)
        record += zip(map(nfc, names), sides.tolist(), codes.tolist(), strict=True)
        if not images.names:
            break
    return record


def label_hashes(images: ImageSet) -> np.ndarray:
    """Return a hash of the class of each image, or of its labels, uint64 (N,)."""
    if images.has_several_labels:
        names = "|".join(images.classes).encode()
        return hashes(names + row.tobytes() for row in images.labels.numpy())
    return hashes(name.encode() for name in images.classes)[images.labels.numpy()]


def image_hashes(images: ImageSet) -> np.ndarray:
    """Return a hash of the pixels of each image, uint64 (N,), by which it is known everywhere."""
    parts = [np.zeros(0, np.uint64)]
    for rows in torch.arange(len(images)).split(4096):  # in parts, because the images may be memory-mapped
        parts.append(hashes(images.take(rows).flatten(1).numpy()))
    return np.concatenate(parts)


def hashes(items: Iterable[Buffer]) -> np.ndarray:
    """Return a hash of each item, an array or bytes, as uint64 (N,)."""
    return np.frombuffer(b"".join(sha256(item).digest()[:8] for item in items), np.uint64)


def recorded_rows(record: Mapping[str, Any]) -> list[Row] | None:
    """Return the rows of a record, None if its images have no names."""
    packed = record.get("rows")
    if packed is None:
        return None
    return [(name, side, code) for name, side, code in json.loads(zlib.decompress(packed.numpy().tobytes()))]


def split_fault(parts: SplitImages, saved: list[Row] | None) -> str:
    """Return how the images and their sides differ from the rows of a record. None: rows without names."""
    if saved is None:
        fault = f"the images of {parts.dataset}, or their order, differ from those that this run was trained on"
        return f"{fault}: use the same images, or start a new run"
    rows = {*split_rows(parts)}
    codes = {(name, code) for name, _, code in rows}
    names = {name for name, _, _ in rows}
    faults = {
        "are missing": [name for name, _, _ in saved if name not in names],
        "have changed": [name for name, _, code in saved if (name, code) not in codes],
        "would change sides": [name for name, side, code in saved if (name, side, code) not in rows],
    }
    fault, images = next((each for each in faults.items() if each[1]), ("are in another order", [*names]))
    text = f"images of this run {fault} ({len(images):,} of {len(saved):,}): {listed(images)}"
    return f"{text}. Restore the images and their table as they were, or start a new run"
