"""`ImageSet`, the common format returned by every data source, and `Batch`, one device's part of a global batch."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.text import is_name


@dataclass(frozen=True)
class ImageSet:
    """Images with their labels and class names.

    Args:
        images: uint8 (N, H, W, C), with C = 1 or 3.
        labels: int64 (N,), values in [0, len(classes)). Of images with several labels, float32 (N, classes): 1 for the
            labels of an image, 0 for others, -1 for unknown ones.
        classes: names of the classes, in label order.
        val_rows: rows of the data set's own validation images, if it has any.
        mapped: whether the images are memory-mapped from a file.
        groups: int64 (N,), equal for images that must stay on the same side of a split.
        names: names of the images, such as their paths in the folder; empty if they have none.
        levels: values of 16-bit images that became black and white, see `decode.Preparation`.
        skipped: names of unreadable images that were left out.
        columns: names of groups with the value of each image, such as its camera; see `data.groups`.

    Raises:
        ValueError: for an invalid shape, dtype, label or class name.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    val_rows: range | None = None
    mapped: bool = False
    groups: Tensor | None = None
    names: Sequence[str] = ()
    levels: tuple[int, int] | None = None
    skipped: Sequence[str] = ()
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.shape[3:] not in ((1,), (3,)):
            shape = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise ValueError(f"images must be uint8 (N, H, W, C), with 1 or 3 channels, not {shape}")
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images have {len(self.labels)} labels")
        check_class_names(self.classes)
        if self.has_several_labels:
            for name in self.classes:
                if "|" in name:
                    raise UsageError(f"rename the class {name!r}: | stands between several labels of an image")
        elif len(self) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ValueError(f"labels must be in 0 … {len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may have several labels, or none."""
        return self.labels.ndim == 2

    def label_text(self, row: int) -> str:
        """Return the class of an image, or its labels with `|` between them."""
        return label_text(self.labels[row], self.classes)

    def class_counts(self, rows: Tensor) -> Tensor:
        """Return the number of images of each class among `rows`, int64 (B,), as int64 (classes,)."""
        labels = self.labels[rows]
        if self.has_several_labels:
            return (labels == 1).sum(0)
        return torch.bincount(labels, minlength=len(self.classes))

    def name(self, row: int) -> str:
        """Return the name of an image, or # and its row in a data set without names."""
        if self.names:
            return self.names[row]
        return f"#{row}"

    def groups_of(self, rows: Tensor) -> Tensor | None:
        """Return the groups of the images at `rows`, int64 (B,); None without groups."""
        if self.groups is None:
            return None
        return self.groups[rows]

    def take(self, rows: Tensor) -> Tensor:
        """Return the images at `rows`, int64 (B,), as uint8 (B, H, W, C)."""
        self.prefetch(rows)
        return self.images.index_select(0, rows)

    def subset(self, rows: Tensor) -> ImageSet:
        """Return the images at `rows`, int64 (B,), as a set."""
        numbers = rows.tolist()
        names: list[str] = []
        if self.names:
            names = [self.names[row] for row in numbers]
        columns = {name: [values[row] for row in numbers] for name, values in self.columns.items()}
        images, labels, groups = self.take(rows), self.labels[rows], self.groups_of(rows)
        return ImageSet(images, labels, self.classes, groups=groups, names=names, columns=columns)

    def prefetch(self, rows: Tensor | None = None) -> None:
        """Prefetch memory-mapped images with madvise: those at `rows`, int64 (B,), or all of them.

        Without madvise, page faults make reads 30 times slower.
        """
        if not self.mapped or sys.platform != "linux":
            return
        madvise = ctypes.CDLL(None).madvise
        size = self.images.stride(0)  # bytes of an image
        spans = [(0, self.images.numel())]
        if rows is not None:
            spans = [(row * size, size) for row in rows.tolist()]
        for offset, length in spans:
            start = self.images.data_ptr() + offset
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            madvise(ctypes.c_void_p(page), ctypes.c_size_t(start + length - page), mmap.MADV_WILLNEED)

    @property
    def input_shape(self) -> list[int]:
        """Channels, height and width of each image, in the order of a net's input."""
        height, width, channels = self.images.shape[1:]
        return [channels, height, width]


def check_class_names(names: Sequence[object], subject: str = "the data set's class") -> None:
    """Raise UsageError for an invalid class name. The message begins with `subject`."""
    for name in names:
        if not is_name(str(name)):
            rule = "a class name is text without tabs, line breaks and other control characters"
            raise UsageError(f"{subject} {str(name)[:80]!r} has to be renamed: {rule}")


def label_names(label: Tensor, classes: Sequence[str]) -> list[str]:
    """Return the class of a label, int64 (), or the classes that are 1 in float (classes,)."""
    if label.ndim == 0:
        return [classes[int(label)]]
    return [classes[number] for number in (label == 1).nonzero()[:, 0].tolist()]


def label_text(label: Tensor, classes: Sequence[str]) -> str:
    """Return the names of a label with `|` between them."""
    return "|".join(label_names(label, classes))


def spread_rows(rows: Tensor, limit: int) -> Tensor:
    """Return at most `limit` of `rows`, int64 (N,), evenly spaced, because the first rows may all be of one class."""
    count = min(len(rows), limit)
    return rows[torch.arange(count) * len(rows) // max(1, count)]


PADDING = -1  # label of an image that is not counted
Pair = Sequence[Tensor]  # images and labels of a loader that is not ours


@dataclass(eq=False)
class Batch:
    """One device's part of a global batch. It unpacks as `images, labels = batch`.

    Args:
        images: uint8 (B, H, W, C) from a loader; float32 (B, C, H, W) in channels_last memory after preprocessing.
        labels: int64 (B,), or float32 (B, classes) as in `ImageSet`; `PADDING` for images that are not counted.
        indices: int64 (B,), rows of the image set; (0,) in a batch of a loader that is not ours.
        loss_weight: this part's fraction of the global batch, times the number of devices; 0 for a device without a
            part. Averaged over devices, the gradients are then the gradient of the global batch's mean loss.
        targets: float32 (B, classes), the share of each class in mixed images; None if images are not mixed.
        epoch: epoch of the augmentation.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    loss_weight: float = 1.0
    targets: Tensor | None = None
    epoch: int = 0

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, index: int) -> Tensor:
        return (self.images, self.labels)[index]

    def __len__(self) -> int:
        return 2

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. Called by Lightning.

        Copies from page-locked memory do not synchronise the device.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory. Called by torch's DataLoader."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = replace(self, images=change(self.images), labels=change(self.labels), indices=change(self.indices))
        if self.targets is not None:
            changed.targets = change(self.targets)
        return changed


def as_batch(batch: Batch | Pair) -> Batch:
    """Return images and labels of any loader as a Batch."""
    if isinstance(batch, Batch):
        return batch
    images, labels = batch
    return Batch(images, labels, labels.new_empty(0))
