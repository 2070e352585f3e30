"""Load a data set by its name. A new data set is a function of (settings, train) and a line in `SOURCES`.

Data sets from elsewhere are named by import path (`my_data.load`), or added to `SOURCES` by a program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.plugins import check_no_file, find_part, is_import_path, part_name
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.formats import IMAGES, TABLES
from cifar_lit.data.settings import DataSettings
from cifar_lit.data.shapes import shapes
from cifar_lit.data.torchvision_sets import cifar, fashion_mnist, has_cifar, has_fashion_mnist

Load = Callable[[DataSettings, bool], ImageSet]


@dataclass(frozen=True)
class Source:
    """A data set.

    load: returns the training (True) or test images. Downloads, decodes or draws them if necessary.
    at_hand: whether `load` only reads: nothing has to be downloaded or unpacked, and no lock is taken.
    fixed: settings with only one valid value, such as {"image_size": 32}.
    labels: number of classes by kind of labels, if there are several kinds; `data.labels` selects one.
    """

    load: Load
    at_hand: Callable[[DataSettings], bool] = lambda settings: True
    fixed: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)


def _folder(settings: DataSettings, train: bool) -> ImageSet:
    from cifar_lit.data.photos.folder import folder  # imports the decoder

    return folder(settings, train)


def _shapes(settings: DataSettings, train: bool) -> ImageSet:
    images = settings.images
    count = images.count
    if not train:
        count //= 5
    return shapes(
        train,
        image_size=images.size or 32,
        channels=images.channels or 3,
        num_classes=images.num_classes or 10,
        count=count,
        seed=settings.split.seed,
    )


def _sizes(image_size: int, channels: int, num_classes: int) -> dict[str, int]:
    return {"image_size": image_size, "channels": channels, "num_classes": num_classes}


SOURCES: dict[str, Source] = {
    "cifar10": Source(partial(cifar, "cifar10"), partial(has_cifar, "cifar10"), _sizes(32, 3, 10)),
    "cifar100": Source(
        partial(cifar, "cifar100"), partial(has_cifar, "cifar100"), _sizes(32, 3, 100), {"fine": 100, "coarse": 20}
    ),
    "fashion_mnist": Source(fashion_mnist, has_fashion_mnist, _sizes(28, 1, 10)),
    "folder": Source(_folder, at_hand=lambda each: bool(each.root) and each.path.exists()),
    "shapes": Source(_shapes),
}


def load_images(data: str | Source | Load, settings: DataSettings, train: bool) -> ImageSet:
    """Return the training or test images of a data set.

    Args:
        data: a name in `SOURCES`; or a `Source` or a `load` function, or the import path of one.
        train: whether to return the training images.

    Raises:
        UsageError: the name is unknown, or the settings do not fit the data set.
        Failure: the images are not available.
    """
    source, kind, dataset = find_source(data), settings.images.labels, part_name(data)
    if kind is not None and kind not in source.labels:
        if kind.lower().endswith(TABLES) and dataset != "folder":
            from cifar_lit.data.photos.reviewed import with_reviewed_labels

            unchanged = replace(settings, images=replace(settings.images, labels=None))
            images = load_images(data, unchanged, train)
            return with_reviewed_labels(images, Path(kind).expanduser()) if train else images
        remedy = f"use {' or '.join(source.labels)}" if source.labels else "leave data.labels out"
        raise UsageError(f"{dataset} has no labels called {kind!r}: {remedy}")
    if dataset in SOURCES and dataset != "folder":
        _check_no_own_images(dataset, settings)
    fixed = {**source.fixed, "num_classes": source.labels[kind]} if kind else source.fixed
    for name, value in fixed.items():
        given = getattr(settings.images, name)
        if given not in (None, value):
            raise UsageError(f"data.{name} of {dataset} is {value}, not {given}: leave it out")
    images = source.load(settings, train)
    for name in settings.images.group_names:
        if name not in images.columns:
            remedy = "a table with this column, or `folder` for the folders below the class folders"
            raise UsageError(f"data.groups: the images of {dataset} have no {name!r}: use {remedy}")
    return images if images.images.is_contiguous() else replace(images, images=images.images.contiguous())


def _check_no_own_images(dataset: str, settings: DataSettings) -> None:
    """Raise UsageError if the root holds folders of images, but the data set is another."""
    if settings.root is None or not _has_class_folders(settings.path):
        return
    source = SOURCES[dataset]
    if source.fixed and source.at_hand(settings):  # last, because it computes checksums
        return
    reason = f"--data-dir {settings.root} holds folders of images, but the data set is {dataset}"
    raise UsageError(f"{reason}: add --dataset folder to train on them, or leave --data-dir out")


def _has_class_folders(root: Path) -> bool:
    """Return whether `root` has images in `<class>/` or `train/<class>/`. Only looks at the first files of a folder."""
    with suppress(OSError):
        folders = [path for pattern in ("*", "train/*") for path in root.glob(pattern) if path.is_dir()]
        return any(path.name.lower().endswith(IMAGES) for folder in folders for path in islice(folder.iterdir(), 20))
    return False


def find_source(dataset: str | Source | Load) -> Source:
    """Return the source of a data set. Raise UsageError if its name is unknown."""
    if isinstance(dataset, str) and dataset in SOURCES:
        return SOURCES[dataset]
    if not isinstance(dataset, str) or is_import_path(dataset):
        target = find_part(dataset)
        return target if isinstance(target, Source) else Source(target)
    check_no_file(dataset)
    is_folder = os.path.isdir(dataset)  # noqa: PTH112 (Path raises errors for impossible names)
    hint = f" Did you mean --dataset folder --data-dir {dataset}?" if is_folder else nearest(dataset, SOURCES)
    raise UsageError(f"no data set is called {dataset!r}.{hint} There are {', '.join(SOURCES)}.")
