"""`Preprocessing`: what happens to whole batches on the training device, up to the input of the net."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from cifar_lit.data.batch import Batch
from cifar_lit.data.device_augment import DeviceAugmentation
from cifar_lit.data.image_set import ImageSet, spread_rows
from cifar_lit.data.resolution import check_resolutions, shrink, side_at
from cifar_lit.data.split_images import SplitImages
from cifar_lit.errors import UsageError

STATISTICS_BYTES = 2048 * 32 * 32 * 3  # measured at once; as floats they take twelve times as many

Finish = Callable[[Tensor], Tensor]  # from uint8 or float32 (B, H, W, C) in 0 … 255 to float32 (B, C, H, W)


class Preprocessing:
    """Augment, resize and normalise batches on their device.

    Args:
        parts: the images. Their training part is measured for missing statistics.
        mean: of the channels in [0, 1] units; one number for all channels, or one for each.
        std: standard deviation of the channels, likewise.
        augmentation: drawn per image, and computed on the device.
        resolutions: share of the epochs by side in pixels, in the order of training.
        seed: seed of the augmentation.
    """

    def __init__(
        self,
        parts: SplitImages,
        *,
        mean: list[float] | float | None = None,
        std: list[float] | float | None = None,
        augmentation: DeviceAugmentation | None = None,
        resolutions: Mapping[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.parts, self.augmentation, self.seed = parts, augmentation, seed
        self.resolutions = resolutions or {}
        self._mean, self._std = mean, std
        self._constants: Tensor | None = None  # mean and std on the device of the batches

    def check(self) -> None:
        """Raise UsageError if the settings do not fit the size of the images."""
        _, height, width = self.parts.train_images.input_shape
        check_resolutions(self.resolutions, height, width)
        if self.augmentation:
            self.augmentation.check(height, width)

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, as given or measured."""
        channels, mean, std = self.parts.train_images.input_shape[0], self._mean, self._std
        if mean is None or std is None:
            measured = channel_statistics(self.parts.train_images, self.parts.split[0])
            mean, std = measured[0] if mean is None else mean, measured[1] if std is None else std
        mean, std = (value if isinstance(value, list) else [float(value)] * channels for value in (mean, std))
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            numbers = f"data.mean and data.std need {channels} numbers (std above 0)"
            raise UsageError(f"{numbers}, one a channel, or one for all")
        return mean, std

    def mean_colour(self, device: torch.device) -> Tensor:
        """Return the mean colour, uint8 (C,)."""
        return (torch.tensor(self.statistics[0]) * 255).round().to(torch.uint8).to(device)

    def side(self, epoch: int, epochs: int | None) -> int | None:
        """Return the side that training images are scaled to in an epoch, None for their own size or without an end."""
        return side_at(self.resolutions, epoch, epochs) if epochs else None

    def normalise(self, images: Tensor, side: int | None = None) -> Tensor:
        """Return images (B, H, W, C) in 0 … 255 as float32 (B, C, H, W), normalised, and scaled to a side if given."""
        if side is not None:
            images = shrink(images, side)
        return normalise(images, *self._constants_on(images.device))

    def eval_batch(self, batch: Batch) -> Batch:
        """Return a batch as it is evaluated: normalised."""
        return replace(batch, images=self.normalise(batch.images))

    def train_batch(self, batch: Batch, side: int | None = None) -> Batch:
        """Return a batch as it is trained on: augmented, scaled to a side if given, and normalised."""
        return self.augment(batch, partial(self.normalise, side=side))

    def augment(self, batch: Batch, finish: Finish) -> Batch:
        """Return a batch after augmentation of its images one by one, `finish`, and mixing of images."""
        rows, epoch = batch.indices, batch.epoch
        batch = replace(batch, images=self.augment_images(batch.images, rows, self.seed, epoch, finish))
        if self.augmentation and self.augmentation.mixes:
            classes = len(self.parts.train_images.classes)
            images, targets = self.augmentation.mix(batch.images, batch.labels, classes, rows, self.seed, epoch)
            batch = replace(batch, images=images, targets=targets)
        return batch

    def augment_images(self, images: Tensor, rows: Tensor, seed: int, epoch: int, finish: Finish) -> Tensor:
        """Return images augmented one by one, as functions of (seed, epoch, row), after `finish`."""
        if self.augmentation is None:
            return finish(images)
        fill = self._constants_on(images.device)[0] * 255
        return self.augmentation.apply(images, rows, seed, epoch, fill, finish)

    def _constants_on(self, device: torch.device) -> Tensor:
        if self._constants is None or self._constants.device != device:
            self._constants = torch.tensor(self.statistics, dtype=torch.float32, device=device)
        return self._constants


def channel_statistics(images: ImageSet, rows: Tensor, most: int = 50_000) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel, in [0, 1] units, rounded to 4 digits.

    Args:
        images: the images.
        rows: int64 (N,), rows of the images to measure.
        most: number of these that are read at most.
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


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (x / 255 - mean) / std, float32 (B, C, H, W) in channels_last memory.

    It works on whole rows of pixels with tiled constants. This vectorises where a broadcast over 3 channels would not.

    Args:
        images: uint8 or float32 (B, H, W, C) in 0 … 255. Floats are changed in place.
        mean: (C,), in [0, 1] units.
        std: (C,), in [0, 1] units.
    """
    count, height, width, channels = images.shape
    scale = (1.0 / (255.0 * std)).repeat(width)
    shift = (-mean / std).repeat(width)
    rows = images.reshape(count * height, width * channels).float().mul_(scale).add_(shift)
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)
