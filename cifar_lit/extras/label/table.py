"""The table of reviewed labels: the labels and the split of a run's data, with the decisions of its review."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import writing
from cifar_lit.base.text import csv_cell, csv_text
from cifar_lit.data.photos.layout import TABLES
from cifar_lit.data.sources import load_images
from cifar_lit.extras.label.journal import Decision

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.data.image_set import ImageSet

TABLE = "labels-reviewed.csv"  # in the run folder


def is_cell(name: str) -> bool:
    """Return whether a name is visible text, and no spreadsheet runs it as a formula."""
    return bool(name) and csv_cell(name) == name


class Labels(NamedTuple):
    """The labels of a run's data, training and validation images first."""

    column: str  # `path`, or `image` for a data set without files
    keys: list[str]  # see `Decision.image`
    labels: list[str]
    extra: str  # a further column: `split` to keep train, val and test, or `group`; empty for none
    values: list[str]  # cells of the further column
    groups: list[object]  # images with equal values belong on one side of a split; None for no group

    def check(self) -> None:
        """Raise Failure for names that a spreadsheet would change or run."""
        for name in (*self.keys, *self.labels):
            if not is_cell(name):
                raise Failure(f"{name!r} cannot be written to a table: rename it; after that, train again")

    def with_split_of(self, earlier: Mapping[str, str]) -> Labels:
        """Return the labels with the split of an earlier table, whose splits are given by key.

        A split drawn from a folder changes with its files, so the table keeps its own. Other images, which were added
        or dropped, are on the side of their group, and else trained on.
        """
        if self.extra != "split":
            return self
        if earlier.keys().isdisjoint(self.keys):  # the images were moved
            return self
        by_group = {}
        for key, group in zip(self.keys, self.groups, strict=True):
            if key in earlier and group is not None:
                by_group[group] = earlier[key]
        sides = []
        for key, group in zip(self.keys, self.groups, strict=True):
            sides.append(earlier.get(key, by_group.get(group, "train")))
        return self._replace(values=sides)

    def write(self, path: Path, decisions: Mapping[str, Decision]) -> int:
        """Write the table of reviewed labels without dropped images; return its number of rows.

        Columns: `path` or `image`, `label`, `original_label`, `reviewed` (date, empty if the image was never reviewed)
        and `extra`. New images have no original label, and are training images.
        """
        rows = []
        for key, label, value in zip(self.keys, self.labels, self.values, strict=True):
            made = decisions.get(key)
            if made is None or made.action == "skip":
                rows.append([key, label, label, "", value])
            elif made.label is not None:
                rows.append([key, made.label, label, made.date, value])
        own = {*self.keys}
        for key, made in decisions.items():
            if key in own:
                continue
            if made.new and made.label is not None:
                value = "train" if self.extra == "split" else key
                rows.append([key, made.label, "", made.date, value])
        columns = [self.column, "label", "original_label", "reviewed", self.extra]
        count = len(columns) if self.extra else 4
        with writing(path, "Free some space, or make the folder writable.") as partial:
            partial.write_text(csv_text(row[:count] for row in (columns, *rows)), encoding="utf-8", newline="\n")
        return len(rows)


def current_labels(data: ImageData) -> Labels:
    """Return the labels of a run's images, training and validation images first, with the split of the run.

    A cross-validation has no split, unless the data set has its own test images.
    """
    if data.dataset == "folder":
        return _labels_of_files(data)
    images, labels = data.train_images, data.settings.images.labels
    if labels == "coarse":
        raise UsageError("the coarse labels of cifar100 cannot be reviewed: review a run on the fine labels")
    keys = [str(row) for row in range(len(images))]
    if str(labels).lower().endswith(TABLES):
        keys = list(images.names)
    extra = "split"
    if data.parts.folds:
        extra = ""
    return Labels("image", keys, _class_names(images), extra, _sides(data), _groups(images))


def _labels_of_files(data: ImageData) -> Labels:
    images, test = data.train_images, load_images("folder", data.settings, train=False)
    trained = {*images.names}  # without test images, the validation images are the test set
    test_rows = [row for row, name in enumerate(test.names) if name not in trained]
    folder = data.settings.path.absolute()
    if not folder.is_dir():  # the table of the images
        folder = folder.parent
    keys = [os.path.normpath(folder / name) for name in images.names]
    names = _class_names(images)
    values = _sides(data)
    groups = _groups(images)
    test_names, test_groups = _class_names(test), _groups(test)
    for row in test_rows:
        keys.append(os.path.normpath(folder / test.names[row]))
        names.append(test_names[row])
        values.append("test")
        groups.append(test_groups[row])
    extra = "split"
    if data.parts.folds and not test_rows:
        extra = ""
        if images.groups is not None:
            extra = "group"
            values = [*map(str, images.groups.tolist())]
    return Labels("path", keys, names, extra, values, groups)


def _class_names(images: ImageSet) -> list[str]:
    return [images.classes[label] for label in images.labels.tolist()]


def _sides(data: ImageData) -> list[str]:
    """Return `train` or `val` for each training image, of a cross-validation those of the data set itself."""
    rows: Iterable[int]
    if data.parts.folds:
        rows = data.train_images.val_rows or ()
    else:
        rows = data.split[1].tolist()
    sides = ["train"] * len(data.train_images)
    for row in rows:
        sides[row] = "val"
    return sides


def _groups(images: ImageSet) -> list[object]:
    """Return the group of each image, or of its near-duplicates. Numbers of different sets are unrelated."""
    if images.groups is None:
        return [None] * len(images)
    return [(id(images), group) for group in images.groups.tolist()]
