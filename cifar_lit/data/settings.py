"""Settings of images and of their loading, in groups; and `DataSettings`, what a data source reads of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cifar_lit.base.errors import UsageError, check_choice
from cifar_lit.base.files import as_on_disk

RESIZES = {  # ways to resize an image of another aspect ratio
    "crop": "scaled to cover the size, then cropped to its centre",
    "letterbox": "scaled to fit into the size, with grey (128) borders",
    "squash": "scaled to the size, ignoring the aspect ratio",
}
ImageSize = int | Sequence[int] | str  # 96 for squares, [96, 128] or "96x128" for height and width
PLACEMENTS = ("auto", "device", "host")


@dataclass(frozen=True)
class Images:
    """What the images are, and what a net gets of them.

    Args:
        image_size: pixels of your own images and of shapes: a number for squares, or height and width (96x128,
            [96, 128]).
        resize: how to resize your own images of another aspect ratio: crop (scale to cover, then crop the centre),
            letterbox (scale to fit, with grey borders), or squash (change the aspect ratio).
        channels: 1 or 3, for your own images and shapes.
        levels: values of 16-bit grey images that become black and white, such as [7000, 7400]; by default the range of
            your own images.
        skip_bad: skip damaged and missing images instead of stopping.
        labels: table of labels written by `cifar-lit review`, for data sets that are not your own images.
        groups: columns of the table, such as camera,site, whose values get results of their own. They are only
            reported: `split.group` keeps groups on one side.
        separator: what separates the labels in a cell of your table, such as ";". Its images may then have several
            labels, or none; rows of the same image, or equal files in several class folders, are one image with
            all their labels. Default: found in the cells.
        mean: mean of each channel, for pixels in [0, 1]; measured on the training images if not given.
        std: standard deviation of each channel, for pixels in [0, 1]; measured if not given.
        count: number of training images of shapes; the test set is a fifth of it.
        num_classes: number of classes of shapes.
        figures: most figures on an image of shapes, 1 to 4; with more than 1, an image has several labels.

    Raises:
        UsageError: for invalid values.
    """

    image_size: int | list[int] | str | None = None
    resize: str = "crop"
    channels: int | None = None
    levels: list[int] | None = None
    skip_bad: bool = False
    labels: str | None = None
    groups: list[str] | str | None = None
    separator: str | None = None
    mean: list[float] | float | None = None
    std: list[float] | float | None = None
    count: int = 10_000
    num_classes: int | None = None
    figures: int = 1

    def __post_init__(self) -> None:
        check_choice("data.images.resize", self.resize, RESIZES)
        if self.channels not in (None, 1, 3):
            raise UsageError(f"data.images.channels must be 1 or 3, not {self.channels}")
        if self.image_size is not None:
            parse_image_size(self.image_size)
        if self.levels is not None:
            black, white = self.levels
            if black >= white:
                form = "two values, of black and of white, such as [0, 4095]"
                raise UsageError(f"data.images.levels {list(self.levels)} must be {form}")

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width in pixels, if given."""
        if self.image_size is None:
            return None
        return parse_image_size(self.image_size)

    @property
    def group_names(self) -> list[str]:
        """The names in `groups`, each once."""
        names = self.groups
        if names is None:
            return []
        if isinstance(names, str):
            names = names.split(",")
        return list(dict.fromkeys(name.strip() for name in names))


def parse_image_size(value: ImageSize) -> tuple[int, int]:
    """Return height and width in pixels. Raise UsageError for an invalid size."""
    sides: Sequence[int | str] | str = [value] if isinstance(value, int) else value
    if isinstance(sides, str):
        sides = re.split("[x×]", sides)
    try:
        sizes = [int(side) for side in sides]
        height, width = sizes * 2 if len(sizes) == 1 else sizes
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        form = "a number of pixels for squares, or height x width, such as 96x128"
        raise UsageError(f"--data.image_size must be {form}, not {value!r}") from None
    return height, width


@dataclass(frozen=True)
class Loading:
    """Where images come from and where they are held. It may change when a fit is resumed.

    Args:
        placement: device (all images in the memory of the training device), host (worker processes prefetch them), or
            auto. auto means device if the images fit into half of its free memory.
        workers: number of worker processes that prefetch; 0 for none.
        eval_batch_size: images per step on each device in validation, test and prediction.
        cache_dir: folder for decoded images; the user's cache folder if not given.
        url: URL or path of the archive, instead of the built-in sources.

    Raises:
        UsageError: for invalid values.
    """

    placement: str = "auto"
    workers: int = 2
    eval_batch_size: int = 500
    cache_dir: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        check_choice("data.loading.placement", self.placement, PLACEMENTS)
        if self.workers < 0:
            raise UsageError(f"--data.workers must be 0 or more processes, not {self.workers}")
        if self.eval_batch_size < 1:
            raise UsageError(f"--data.eval_batch_size must be 1 or more images, not {self.eval_batch_size}")

    @property
    def cache_path(self) -> Path:
        """Folder of decoded images. Default: $CIFAR_LIT_CACHE, $XDG_CACHE_HOME/cifar-lit or ~/.cache/cifar-lit."""
        caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        folder = self.cache_dir or os.environ.get("CIFAR_LIT_CACHE") or f"{caches}/cifar-lit"
        return Path(folder).expanduser()


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


@dataclass(frozen=True)
class DataSettings:
    """The settings of `ImageData` that a data source reads."""

    root: str | None = None
    images: Images = Images()
    loading: Loading = Loading()
    split: Split = field(default_factory=Split)
    # NFC paths of the images that a resumed training began with. Later ones are left out.
    only: frozenset[str] | None = None

    @property
    def path(self) -> Path:
        """The root as a path; `data` if not given."""
        return Path(as_on_disk(str(Path(self.root or "data").expanduser())))
