"""Placement of images on the device or the host, and `Preprocessing` of whole batches on their device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError
from cifar_lit.base.memory import free_memory
from cifar_lit.base.text import note_once
from cifar_lit.data.augment import Augment
from cifar_lit.data.image_set import Batch, ImageSet, spread_rows
from cifar_lit.data.split import SplitImages

STATISTICS_BYTES = 2048 * 32 * 32 * 3  # uint8 images, measured at once

Finish = Callable[[Tensor], Tensor]  # uint8 or float32 (B, H, W, C) to (B, C, H, W) in channels_last memory


class Preprocessing:
    """Augment, resize and normalise batches on their device.

    Args:
        parts: the images. Missing statistics are measured on their training part.
        mean, std: of the channels for pixels in [0, 1], one number for all channels or one for each.
        augment: augmentation; `flip`, `crop` and `cutout` have been applied by the loader.
        seed: seed of the augmentation.
    """

    def __init__(
        self,
        parts: SplitImages,
        *,
        mean: list[float] | float | None = None,
        std: list[float] | float | None = None,
        augment: Augment = Augment(),  # noqa: B008 (frozen)
        seed: int = 0,
    ) -> None:
        self.parts = parts
        self._settings = augment
        self.seed = seed
        self._mean, self._std = mean, std
        self._constants: Tensor | None = None  # mean and std on the device of the batches

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, as given or measured."""
        images = self.parts.train_images
        channels = images.input_shape[0]
        mean, std = self._mean, self._std
        if mean is None or std is None:
            measured = channel_statistics(images, self.parts.split[0])
            mean = measured[0] if mean is None else mean
            std = measured[1] if std is None else std
        mean, std = (value if isinstance(value, list) else [float(value)] * channels for value in (mean, std))
        if not len(mean) == len(std) == channels:
            raise UsageError(f"data.images.mean and data.images.std need {channels} numbers, or one for all channels")
        return mean, std

    def normalise(self, images: Tensor, side: int | None = None) -> Tensor:
        """Normalise images (B, H, W, C) in 0 … 255 to float32 (B, C, H, W), scaled to `side` if given."""
        if side is not None:
            images = shrink(images, side)
        return normalise(images, *self._constants_on(images.device))

    def train_batch(self, batch: Batch, side: int | None = None) -> Batch:
        """Augment and normalise a batch for training, scaled to `side` if given."""
        return self.augment_batch(batch, partial(self.normalise, side=side))

    def augment_batch(self, batch: Batch, finish: Finish) -> Batch:
        """Augment the images of a batch one by one, apply `finish`, then mix images."""
        key = (batch.indices, self.seed, batch.epoch)
        images, targets = finish(self._settings.change(batch.images, *key)), batch.targets
        if self._settings.mixes:
            classes = len(self.parts.train_images.classes)
            images, targets = self._settings.mix(images, batch.labels, classes, *key)
        return replace(batch, images=images, targets=targets)

    def _constants_on(self, device: torch.device) -> Tensor:
        if self._constants is None or self._constants.device != device:
            self._constants = torch.tensor(self.statistics, dtype=torch.float32, device=device)
        return self._constants


MEASURED = 50_000  # images, evenly spaced
# A channel with less than this share of the largest standard deviation counts as constant. Divided by its own, the
# noise of a JPEG would be all that a net sees of it.
CONSTANT = 0.02


def channel_statistics(images: ImageSet, rows: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel for pixels in [0, 1], rounded to 4 digits.

    A constant channel gets the mean deviation of the others, or 0.25 if there are none.

    rows: int64 (N,), rows to measure; of more than `MEASURED`, as many.
    """
    rows = spread_rows(rows, MEASURED)
    channels, height, width = images.input_shape
    pixels = height * width * len(rows)
    total, squares = torch.zeros(2, channels, dtype=torch.float64)
    for part in rows.split(max(1, min(2048, STATISTICS_BYTES // (channels * height * width)))):
        values = images.take(part).view(-1, channels).float() / 255.0
        total += values.sum(0)
        squares += values.square().sum(0)
    mean = total / pixels
    std = (squares / pixels - mean.square()).clamp_min(1e-6).sqrt()
    varied = std > max(1e-3, CONSTANT * float(std.max()))
    if not varied.all():
        std[~varied] = std[varied].mean() if varied.any() else 0.25
        count = f"{int((~varied).sum())} of {channels} channels of the training images"
        note_once(f"{count} are constant: they are normalised as the others are on average (--data.std)")
    return [round(x, 4) for x in mean.tolist()], [round(x, 4) for x in std.tolist()]


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (x / 255 - mean) / std, float32 (B, C, H, W) in channels_last memory.

    Constants are tiled to whole rows of pixels, which vectorises better than broadcasting over 3 channels.

    Args:
        images: uint8 or float32 (B, H, W, C) in 0 … 255. Floats are changed in place.
        mean, std: (C,), for pixels in [0, 1].
    """
    count, height, width, channels = images.shape
    scale = (1.0 / (255.0 * std)).repeat(width)
    shift = (-mean / std).repeat(width)
    rows = images.reshape(count * height, width * channels).float().mul_(scale).add_(shift)
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)


@lru_cache
def _weights(height: int, width: int, channels: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return matrices that shrink an image (H, W·C) from the left and from the right."""
    rows = _area_weights(height, side)
    columns = _area_weights(width, round(width * side / height))
    return rows.to(device), torch.kron(columns, torch.eye(channels)).T.contiguous().to(device)


def _area_weights(size: int, small: int) -> Tensor:
    """Return the matrix (small, size) that averages a column of `size` pixels to `small` ones."""
    identity = torch.eye(size).view(1, size, size, 1)
    return F.interpolate(identity, (small, 1), mode="area").view(size, small).T.contiguous()


def shrink(images: Tensor, side: int) -> Tensor:
    """Downsample images, uint8 (B, H, W, C), to float32 (B, side, side·W/H, C) in 0 … 255 by averaging areas.

    The result equals `F.interpolate(mode="area")`. Two matrix products take a tenth of its time on a CPU.
    """
    count, height, width, channels = images.shape
    rows, columns = _weights(height, width, channels, side, images.device)
    small = torch.matmul(rows, images.view(count, height, width * channels).float())
    return (small.view(count * side, width * channels) @ columns).view(count, side, -1, channels)


class Placed(NamedTuple):
    """Images, and their place: `device` or `host`."""

    images: ImageSet
    place: str


def place_images(images: ImageSet, kind: str, device: torch.device) -> Placed:
    """Return images on the device or the host.

    Args:
        kind: device (the memory of the training device), host (their file or host memory), or auto. auto means device
            if the images fit into half of its free memory.
    """
    place = kind
    if kind == "auto":
        free = free_memory(device)  # None if unknown
        place = "host"
        # The net, activations and other programs need the other half.
        if free is None or 2 * images.images.nbytes <= free:
            place = "device"
    if place == "device":
        images.prefetch()
        images = replace(images, images=images.images.to(device), labels=images.labels.to(device), mapped=False)
    return Placed(images, place)
