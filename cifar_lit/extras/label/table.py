"""The table of reviewed labels: the labels and the split of a run's data, with the decisions of its review."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cifar_lit.base.files import writing
from cifar_lit.base.text import csv_text, printable
from cifar_lit.data.image_set import label_text
from cifar_lit.data.photos.table import UNKNOWN_LABELS, read_table
from cifar_lit.data.sources import load_images
from cifar_lit.extras.label.journal import Decision

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.data.image_set import ImageSet

TABLE = "labels-reviewed.csv"  # in the run folder
OWN = ("path", "label", "original_label", "reviewed", "split")  # its own columns


def is_cell(name: str) -> bool:
    """Return whether a name is visible text, which a table holds unchanged."""
    return bool(name) and printable(name) == name


class Labels(NamedTuple):
    """The labels of a run's data, training and validation images first."""

    column: str  # `path`, or `image` for a data set without files
    keys: list[str]  # see `Decision.image`
    labels: list[str]
    columns: dict[str, list[str]]  # further columns: `split` to keep train, val and test; those of the user's table
    groups: list[object]  # images with equal values belong on one side of a split

    def with_split_of(self, earlier: Mapping[str, str]) -> Labels:
        """Return the labels with the split of an earlier table, whose splits are given by key.

        A split drawn from a folder changes with its files, so the table keeps its own. Other images, which were added
        or dropped, are on the side of their group, and else trained on.
        """
        if "split" not in self.columns or earlier.keys().isdisjoint(self.keys):  # the images were moved
            return self
        groups = dict(zip(self.keys, self.groups, strict=True))
        by_group = {group: earlier[key] for key, group in groups.items() if key in earlier}
        split = [earlier.get(key, by_group.get(group, "train")) for key, group in groups.items()]
        return self._replace(columns={**self.columns, "split": split})

    def write(self, path: Path, decisions: Mapping[str, Decision]) -> int:
        """Write the table of reviewed labels without dropped images; return its number of rows.

        Columns: `path` or `image`, `label`, `original_label`, `reviewed` (date, empty if the image was never reviewed)
        and `columns`. New images have no original label, and are training images. A reviewed
        image has no unknown label.
        """
        rows = [[self.column, "label", "original_label", "reviewed", *self.columns]]
        for key, label, *values in zip(self.keys, self.labels, *self.columns.values(), strict=True):
            made = decisions.get(key)
            if made is None or made.action == "skip":
                rows.append([key, label, label, "", *values])
            elif made.label is not None:
                if UNKNOWN_LABELS in self.columns:
                    values[[*self.columns].index(UNKNOWN_LABELS)] = ""
                rows.append([key, made.label, label, made.date, *values])
        own = {*self.keys}
        for key, made in decisions.items():
            if made.new and made.label is not None and key not in own:
                values = ["train" if name == "split" else "" for name in self.columns]
                rows.append([key, made.label, "", made.date, *values])
        with writing(path, "Free some space, or make the folder writable.") as partial:
            partial.write_text(csv_text(rows), encoding="utf-8", newline="\n")
        return len(rows) - 1


def current_labels(data: ImageData) -> Labels:
    """Return the labels of a run's images, training and validation images first, with the split of the run.

    A cross-validation has no split, unless the data set has its own test images.
    """
    if data.dataset == "folder":
        return _labels_of_files(data)
    images = data.train_images
    keys = [*images.names] or [str(row) for row in range(len(images))]
    columns = {}
    if not data.parts.folds:
        columns["split"] = _sides(data)
    return Labels("image", keys, _class_names(images), columns, _groups(images))


def _labels_of_files(data: ImageData) -> Labels:
    settings, folder = data.settings, data.settings.path.absolute()
    names = settings.images.group_names
    if not folder.is_dir():
        names += read_table(folder, settings.split.group, separator=settings.images.separator).unused
        folder = folder.parent
    if settings.split.group:
        names.append(settings.split.group)
    settings = replace(settings, images=replace(settings.images, groups=names))
    images, test = (load_images("folder", settings, train=train) for train in (True, False))
    keys, labels, groups, unknown = [], [], [], []
    columns: dict[str, list[str]] = {name: [] for name in names if name not in OWN}
    for part in (images, test):
        keys += [os.path.normpath(folder / name) for name in part.names]
        labels += _class_names(part)
        groups += _groups(part)
        if part.has_several_labels:
            unknown += [label_text(-row, part.classes) for row in part.labels]
        for name, values in columns.items():
            values += part.columns[name]
    if any(unknown):
        columns[UNKNOWN_LABELS] = unknown
    if len(test) or not data.parts.folds:
        columns["split"] = [*_sides(data), *["test"] * len(test)]
    return Labels("path", keys, labels, columns, groups)


def _class_names(images: ImageSet) -> list[str]:
    return [images.label_text(row) for row in range(len(images))]


def _sides(data: ImageData) -> list[str]:
    """Return `train` or `val` for each training image, of a cross-validation `train`."""
    if data.parts.folds:
        return ["train"] * len(data.train_images)
    return ["val" if part == "val" else "train" for part in data.parts.part_names()]


def _groups(images: ImageSet) -> list[object]:
    """Return the group of each image, or of its near-duplicates. Numbers of different sets are unrelated."""
    groups = range(len(images)) if images.groups is None else images.groups.tolist()
    return [(id(images), group) for group in groups]
