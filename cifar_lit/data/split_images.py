"""`SplitImages`: the images of one data set, and which of them are for training, validation and test."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.progress import note_once
from cifar_lit.data.sources import SourceSettings, load_images
from cifar_lit.data.splits import fold_rows, split_validation
from cifar_lit.errors import UsageError

FEW_VALIDATION_IMAGES = 20  # one image is 5 % of the accuracy or more


class SplitImages:
    """Training, validation and test images of one data set, loaded on first access.

    Args:
        dataset: name of the data set; see `data.sources`.
        settings: settings of its source.
        val_size: number (1 or more) or fraction (below 1) of the training images to validate on.
        folds: number of parts of a cross-validation; 0 for none.
        fold: the part to test on.
    """

    def __init__(
        self,
        dataset: str,
        settings: SourceSettings,
        *,
        val_size: float = 0.1,
        folds: int = 0,
        fold: int = 0,
    ) -> None:
        if folds and not (folds > 1 and 0 <= fold < folds):
            fault = f"data.fold {fold} of data.folds {folds} cannot be"
            raise UsageError(f"{fault}: folds are 2 or more, and counted from 0")
        self.dataset, self.val_size, self.folds, self.fold = dataset, val_size, folds, fold
        # Every image is tested on in one of the folds, so none is set apart.
        self.settings = replace(settings, test_size=None) if folds else settings

    @cached_property
    def train_images(self) -> ImageSet:
        """All images to train and validate on; with `folds` also those to test on."""
        return load_images(self.dataset, self.settings, train=True)

    @cached_property
    def test_images(self) -> ImageSet:
        """All test images."""
        if not self.folds:
            return load_images(self.dataset, self.settings, train=False)
        images, rows = self.train_images, self.fold_rows
        names = [images.names[row] for row in rows.tolist()] if images.names else None
        groups = None if images.groups is None else images.groups[rows]
        return ImageSet(images.take(rows), images.labels[rows], images.classes, groups=groups, names=names)

    @cached_property
    def fold_rows(self) -> Tensor:
        """Rows of `train_images` that form the test set of this fold, int64."""
        images = self.train_images
        folds = fold_rows(images.labels, images.groups, self.folds, self.settings.split_seed)
        return (folds == self.fold).nonzero().flatten()

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """Rows of `train_images` to train and to validate on, both int64: as given by the data set, else drawn."""
        images, seed = self.train_images, self.settings.split_seed
        if self.folds:
            is_left = torch.ones(len(images), dtype=torch.bool)
            is_left[self.fold_rows] = False
            rows = is_left.nonzero().flatten()
            groups = None if images.groups is None else images.groups[rows]
            train, val = split_validation(images.labels[rows], self.val_size, seed, groups)
            return rows[train], rows[val]
        if images.val_rows is None:
            return split_validation(images.labels, self.val_size, seed, images.groups)
        if self.val_size == 0:
            where = self.settings.root or self.dataset
            reason = "as there are validation images, which are not trained on"
            note_once(f"{where}: data.val_size 0 is left aside, {reason}")
        is_val = torch.isin(torch.arange(len(images)), torch.tensor(images.val_rows))
        return (~is_val).nonzero().flatten(), is_val.nonzero().flatten()

    @property
    def class_counts(self) -> Tensor:
        """Number of training images of each class, int64 (classes,)."""
        images = self.train_images
        return torch.bincount(images.labels[self.split[0]], minlength=len(images.classes))

    def warn_of_few_images(self) -> None:
        """Print a note about classes with one training image or none, and about a small validation set."""
        classes, counts = self.train_images.classes, self.class_counts.tolist()
        few = [name for name, count in zip(classes, counts, strict=True) if count <= 1]
        if few:
            names = ", ".join(few[:3]) + (f" and {len(few) - 3:,} more" if len(few) > 3 else "")
            fault = f"{len(few):,} of {len(classes):,} classes have one training image or none ({names})"
            note_once(f"{fault}: add some to them")
        count = len(self.split[1])
        if 0 < count < FEW_VALIDATION_IMAGES:
            images = "1 image chooses" if count == 1 else f"{count} images choose"
            remedy = "raise --data.val_size, or set it to 0 to train on all images and keep the last"
            note_once(f"{images} the best epoch: {remedy}")
