"""Load a data set by its name. A new data set is a function of (settings, train) and a line in `SOURCES`.

Data sets from elsewhere are named by import path (`my_data.load`), or added to `SOURCES` by a program.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.plugins import check_no_file, find_part, is_import_path, part_name
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings

Load = Callable[[DataSettings, bool], ImageSet]


@dataclass(frozen=True)
class Source:
    """A data set.

    load: returns the training (True) or test images. Downloads, decodes or draws them if necessary.
    at_hand: whether `load` only reads: nothing has to be downloaded or unpacked, and no lock is taken.
    channels: 1 or 3, if all of its images have them.
    """

    load: Load
    at_hand: Callable[[DataSettings], bool] = lambda settings: True
    channels: int | None = None


# Data sets by name: a `Source`, or the import path of one, whose module is imported with its first use.
SOURCES: dict[str, Source | str] = {
    "cifar10": "cifar_lit.data.download.CIFAR10",
    "cifar100": "cifar_lit.data.download.CIFAR100",
    "fashion_mnist": "cifar_lit.data.download.FASHION_MNIST",
    "folder": "cifar_lit.data.photos.folder.FOLDER",
    "shapes": "cifar_lit.data.shapes.SHAPES",
}
BUILT_IN = frozenset(SOURCES)  # a program may add others

# Data sets that use a setting of the data; all use the others.
USED_BY = {
    **dict.fromkeys(("images.image_size", "images.channels"), ("folder", "shapes")),
    **dict.fromkeys(("images.count", "images.num_classes", "images.figures"), ("shapes",)),
    **dict.fromkeys(
        (
            "images.resize",
            "images.levels",
            "images.skip_bad",
            "images.groups",
            "images.separator",
            "split.group",
            "split.test_size",
        ),
        ("folder",),
    ),
    "loading.url": ("cifar10", "cifar100", "fashion_mnist"),
}


def check_used(dataset: str, setting: str) -> None:
    """Raise UsageError if a built-in data set does not use a setting, such as `images.count`."""
    users = USED_BY.get(setting, (dataset,))
    if dataset in BUILT_IN and dataset not in users:
        raise UsageError(f"--data.{setting} is for {' and '.join(users)}, and {dataset} does not use it: leave it out")


def load_images(data: str | Source | Load, settings: DataSettings, train: bool) -> ImageSet:
    """Return the training or test images of a data set.

    Args:
        data: a name in `SOURCES`; or a `Source` or a `load` function, or the import path of one.
        train: whether to return the training images.

    Raises:
        UsageError: the name is unknown, or the settings do not fit the data set.
        Failure: the images are not available.
    """
    source, dataset = find_source(data), part_name(data)
    if settings.images.labels is not None:
        return _load_reviewed(data, settings, train)
    if dataset in SOURCES and dataset != "folder":
        _check_no_own_images(dataset, settings)
    for name in ("image_size", "channels", "num_classes"):
        if getattr(settings.images, name) is not None:
            check_used(dataset, f"images.{name}")
    images = source.load(settings, train)
    for name in settings.images.group_names:
        if name not in images.columns:
            raise UsageError(f"data.groups: the images of {dataset} have no {name!r}: use a table with this column")
    return replace(images, images=images.images.contiguous())


def _load_reviewed(data: str | Source | Load, settings: DataSettings, train: bool) -> ImageSet:
    """Return images whose labels are in the table `data.labels`."""
    from cifar_lit.data.photos.table import with_reviewed_labels

    if part_name(data) == "folder":
        raise UsageError("leave data.labels out; a table of own images is named by --data-dir")
    images = load_images(data, replace(settings, images=replace(settings.images, labels=None)), train)
    if train:
        images = with_reviewed_labels(images, Path(str(settings.images.labels)).expanduser())
    return images


def _check_no_own_images(dataset: str, settings: DataSettings) -> None:
    """Raise UsageError for a root of drawn images, or one that holds folders of images for another data set."""
    if settings.root is None:
        return
    if dataset == "shapes":
        raise UsageError(f"--data-dir {settings.root}: shapes are drawn: leave it out, or add --dataset folder")
    if not _has_class_folders(settings.path) or find_source(dataset).at_hand(settings):  # computes checksums
        return
    reason = f"--data-dir {settings.root} holds folders of images, but the data set is {dataset}"
    raise UsageError(f"{reason}: add --dataset folder to train on them, or leave --data-dir out")


def _has_class_folders(root: Path) -> bool:
    """Return whether `root` has images in `<class>/` or `train/<class>/`. Only looks at the first files."""
    from cifar_lit.data.photos.decode import IMAGES

    with suppress(OSError):
        for path in islice(chain(root.glob("*/*"), root.glob("train/*/*")), 1000):
            if path.name.lower().endswith(IMAGES):
                return True
    return False


def find_source(dataset: str | Source | Load) -> Source:
    """Return the source of a data set. Raise UsageError if its name is unknown."""
    if isinstance(dataset, str):
        dataset = SOURCES.get(dataset, dataset)
    if not isinstance(dataset, str) or is_import_path(dataset):
        target = find_part(dataset)
        return target if isinstance(target, Source) else Source(target)
    check_no_file(dataset)
    is_folder = os.path.isdir(dataset)  # noqa: PTH112 (Path raises errors for impossible names)
    hint = f" Did you mean --dataset folder --data-dir {dataset}?" if is_folder else nearest(dataset, SOURCES)
    raise UsageError(f"no data set is called {dataset!r}.{hint} There are {', '.join(SOURCES)}.")
