"""`SplitImages`: the images of one data set, split into training, validation and test, and the record of a split."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.plugins import part_name
from cifar_lit.base.text import counted, listed, nfc
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.progress import note_once
from cifar_lit.data.settings import DataSettings
from cifar_lit.data.sources import Load, Source, load_images
from cifar_lit.data.splits import fold_rows, split_validation, take_share

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
        images, rows = self.train_images, self.fold_rows
        names: list[str] = []
        if images.names:
            names = [images.names[row] for row in rows.tolist()]
        groups = images.groups_of(rows)
        columns = {name: [values[row] for row in rows.tolist()] for name, values in images.columns.items()}
        return ImageSet(
            images.take(rows), images.labels[rows], images.classes, groups=groups, names=names, columns=columns
        )

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
        images = self.train_images
        return torch.bincount(images.labels[self.split[0]], minlength=len(images.classes))

    def warn_of_few_images(self, batch_size: int) -> None:
        """Warn about classes with fewer than two training images, a large batch, and a small validation set."""
        classes = self.train_images.classes
        few = [name for name, count in zip(classes, self.class_counts.tolist(), strict=True) if count <= 1]
        if few:
            part = f"{len(few):,} of {len(classes):,} classes"
            note_once(f"{part} have fewer than 2 training images ({listed(few)}): add more")
        count = len(self.split[0])
        if count < batch_size:
            note_once(f"{counted(count, 'training image')} are less than a batch of {batch_size}: lower --batch-size")
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
        codes = hashes(name.encode() for name in images.classes)[images.labels.numpy()]
        if images.images.nbytes <= HASHED_BYTES:
            codes ^= image_hashes(images)
        record += zip(map(nfc, names), sides.tolist(), codes.tolist(), strict=True)
        if not images.names:
            break
    return record


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
        "are new": names.difference(name for name, _, _ in saved),
    }
    fault, images = next((each for each in faults.items() if each[1]), ("are in another order", names))
    text = f"images of this run {fault} ({len(images):,} of {len(saved):,}): {listed(images)}"
    return f"{text}. Restore the images and their table as they were, or start a new run"
