"""`ImageSet`, the one currency between sources, loaders and everything after them."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cifar_lit.errors import UsageError
from cifar_lit.text import MAX_NAME, is_name

MAX_SIDE = 2048  # pixels of the images that a net takes; these are nets for small images

ImageSize = int | Sequence[int] | str  # of a setting: 96 for squares, [96, 128] or "96x128" for height and width

STATISTICS_BYTES = 2048 * 32 * 32 * 3  # of images that are looked at at once: as numbers they take twelve times as many


@dataclass(frozen=True)
class ImageSet:
    """Images, their labels and the class names; raises ValueError when they do not fit together.

    images: uint8 (N, H, W, C), C = 1 or 3, as decoders give them.
    labels: int64 (N,), values in [0, len(classes)).
    classes: one name a class, in label order.
    val_rows: of training images, the rows that the data set itself keeps for validation; None where it names none.
    mapped: whether the images are mapped from a file, which is read when they are looked at.
    groups: int64 (N,), the same number for images that no split may part; None where each may stand alone.
    names: what each image is called, such as its path below the folder; None where they have no names.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    val_rows: range | None = None
    mapped: bool = False
    groups: Tensor | None = None
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(f"images must be uint8 (N, H, W, C), not {self.images.dtype} {tuple(self.images.shape)}")
        if self.images.shape[3] not in (1, 3):
            raise ValueError(f"images must have 1 or 3 channels, not {self.images.shape[3]}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"labels must be int64 ({len(self.images)},), not {self.labels.dtype} {tuple(self.labels.shape)}")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ValueError(f"labels must be in 0 … {len(self.classes) - 1}")
        if self.groups is not None and (self.groups.dtype != torch.int64 or self.groups.shape != self.labels.shape):
            raise ValueError(f"groups must be int64 ({len(self.labels)},), not {self.groups.dtype} {tuple(self.groups.shape)}")
        check_class_names(self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Tensor:
        """The images of int64 rows (B,): uint8 (B, H, W, C)."""
        self.announce(rows)
        return self.images.index_select(0, rows)

    def announce(self, rows: Tensor | None = None) -> None:
        """Has the system read the images of int64 rows (B,), or all, at once if they are mapped from a file: looked at page by
        page, they come thirty times as slowly.
        """
        if not self.mapped or sys.platform != "linux" or not len(self):
            return
        madvise, size = ctypes.CDLL(None).madvise, self.images[0].numel()
        spans = [(0, self.images.numel())] if rows is None else [(row * size, size) for row in rows.tolist()]
        for offset, length in spans:
            start = self.images.data_ptr() + offset
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            madvise(ctypes.c_void_p(page), ctypes.c_size_t(start + length - page), mmap.MADV_WILLNEED)

    @property
    def input_shape(self) -> list[int]:
        """Channels, height and width of each image, in a net's order."""
        height, width, channels = self.images.shape[1:]
        return [channels, height, width]


def parse_image_size(value: ImageSize) -> tuple[int, int]:
    """Height and width in pixels; raises UsageError for what is no size, and for sides beyond `MAX_SIDE`."""
    sides: Sequence[int | str] = (value,) if isinstance(value, int) else value
    if isinstance(value, str):
        sides = re.split("[x×]", value)
    try:
        height, width = map(int, sides if len(sides) > 1 else (*sides, *sides))
    except ValueError:
        form = "a number of pixels for squares, or height x width, such as 96x128"
        shown = str(list(value) if isinstance(value, tuple) else value)[:40]
        raise UsageError(f"--data.image_size must be {form}, not {shown!r}") from None
    if not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE:
        raise UsageError(f"--data.image_size must be from 1 to {MAX_SIDE:,} pixels a side, not {height}×{width}")
    return height, width


def check_class_names(names: Sequence[object], of: str = "the data set's class") -> None:
    """Raises UsageError for names that nothing could be told by: model.safetensors, tables and pages have the same rule."""
    for name in names:
        if not is_name(name):
            rule = f"a class is called by 1 to {MAX_NAME} characters, without tabs, line breaks and other control characters"
            raise UsageError(f"{of} {str(name)[:80]!r} has to be renamed: {rule}")
    if len(set(names)) < len(names):
        raise UsageError(f"{len(names)} classes have {len(set(names))} names only: give each its own")


def spread_rows(rows: Tensor, most: int) -> Tensor:
    """At most so many of int64 rows (N,), at equal distances: the first ones of own images would all be of one class."""
    count = min(len(rows), most)
    return rows[torch.arange(count) * len(rows) // max(1, count)]


def channel_statistics(images: ImageSet, rows: Tensor, most: int = 50_000) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel over the chosen images, in [0, 1] units, rounded to 4 digits.

    At most `most` of the chosen ones are read.
    """
    rows = spread_rows(rows, most)
    channels, height, width = images.input_shape
    pixels = height * width * len(rows)
    total, squares = torch.zeros(2, channels, dtype=torch.float64)
    for part in rows.split(max(1, min(2048, STATISTICS_BYTES // (channels * height * width)))):
        values = images.take(part).view(-1, channels).float() / 255.0
        total += values.sum(0)
        squares += values.square().sum(0)
    mean = total / pixels
    std = (squares / pixels - mean.square()).clamp_min(1e-6).sqrt()
    return [round(x, 4) for x in mean.tolist()], [max(round(x, 4), 1e-3) for x in std.tolist()]
