"""Augmentation of whole batches, drawn per image as a function of (seed, epoch, image index).

A plan holds one row of draws per image of the training set, made once an epoch. So neither order of batches, number of workers
or devices, nor a restart changes what an image looks like in an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cifar_lit.errors import UsageError, check_choice

FLIPS = ("none", "random", "alternating")

_CYCLES, _ORDER, _MOVES, _FIRST_FLIP = 0, 1, 2, 3  # independent streams of one seed; the numbers only have to differ


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of `count` image indices, int64 (count,), as a function of (seed, epoch)."""
    return torch.from_numpy(np.random.default_rng([_ORDER, seed, epoch]).permutation(count))


def balanced_order(labels: Tensor, seed: int, epoch: int) -> Tensor:
    """As many places in `labels`, int64 (N,), as these are, with each class equally often, as a function of (seed, epoch).

    Each class has a shuffled cycle of its images, on which every epoch goes on where the one before ended. So in each epoch, and
    in all together, how often its images come differs by one at most, and so it does between classes.
    """
    count = len(labels)
    shuffled = np.random.default_rng([_CYCLES, seed]).permutation(count)
    by_class = shuffled[np.argsort(labels.numpy()[shuffled], kind="stable")]
    _, starts = np.unique(labels.numpy()[by_class], return_index=True)
    cycles = np.split(by_class, starts[1:])
    parts = []
    for number, cycle in enumerate(cycles):  # rounded so that the classes' shares add up to the whole in every epoch
        begin, end = ((count * each + number) // len(cycles) for each in (epoch, epoch + 1))
        parts.append(cycle[np.arange(begin, end) % len(cycle)])
    return torch.from_numpy(np.concatenate(parts))[epoch_order(count, seed, epoch)]


@dataclass(frozen=True)
class Augmentation:
    """What happens to training images; UsageError for values that cannot be meant.

    crop: pixels of reflect padding on every side, from which a window of the image's own size is cut at random.
    flip: "none"; "random", mirrored with p = ½; "alternating", a random half in the first epoch, and from then on
        the other half in every next one, so that two epochs show both sides of each image (Jordan, airbench, 2024).
    cutout: side in pixels of a square painted with `fill` at a random place (DeVries and Taylor, 2017); 0 for none.
    """

    crop: int = 0
    flip: str = "none"
    cutout: int = 0

    def __post_init__(self) -> None:
        check_choice("data.flip", self.flip, FLIPS)
        if self.crop < 0 or self.cutout < 0:
            raise UsageError("data.crop and data.cutout are numbers of pixels, 0 or more")

    def check(self, height: int, width: int) -> None:
        """Raises UsageError when images of this size are too small for the settings."""
        least = min(height, width)
        for name, fault in (("cutout", "hides"), ("crop", "is too much for")):
            if (value := getattr(self, name)) >= least:
                raise UsageError(f"data.{name} {value} {fault} {height}×{width} images: use less than {least}")

    def plan(self, count: int, height: int, width: int, seed: int, epoch: int) -> Tensor | None:
        """The draws for every image: int32 (count, 5) of row shift, column shift, flip, cutout row, cutout column.

        Shifts are in [-crop, crop]; flip is 0 or 1; cutout places are centres. None when nothing is to be done.
        """
        if self.crop == 0 and self.flip == "none" and self.cutout == 0:
            return None
        rng = np.random.default_rng([_MOVES, seed, epoch])
        plan = np.empty((count, 5), dtype=np.int32)
        plan[:, :2] = rng.integers(-self.crop, self.crop + 1, size=(count, 2))
        plan[:, 3] = rng.integers(0, height, size=count)
        plan[:, 4] = rng.integers(0, width, size=count)
        if self.flip == "alternating":
            first = np.random.default_rng([_FIRST_FLIP, seed]).integers(0, 2, size=count)
            plan[:, 2] = (first + epoch) % 2
        else:
            plan[:, 2] = rng.integers(0, 2, size=count) if self.flip == "random" else 0
        return torch.from_numpy(plan)


def augment_batch(images: Tensor, indices: Tensor, plan: Tensor | None, cutout: int = 0, fill: Tensor | None = None) -> Tensor:
    """The chosen images, moved as their rows of the plan say: uint8 (B, H, W, C), contiguous.

    images: uint8 (N, H, W, C), contiguous; indices: int64 (B,); plan: int32 (N, 5) from `Augmentation.plan` or None;
    cutout: side of the painted square; fill: uint8 (C,), its colour.
    """
    if plan is None:
        return images.index_select(0, indices)
    _, height, width, channels = images.shape
    moves = plan.index_select(0, indices).long()
    ys = torch.arange(height, device=images.device)
    xs = torch.arange(width, device=images.device)
    # rows are copied whole, which crops vertically on the way; columns are then gathered with crop and flip in one index
    rows = _reflect(ys + moves[:, 0:1], height) + indices[:, None] * height
    batch = images.view(-1, width * channels).index_select(0, rows.flatten()).view(len(indices), height, width * channels)
    mirrored = torch.where(moves[:, 2:3] == 1, width - 1 - xs, xs)
    columns = _reflect(mirrored + moves[:, 1:2], width)
    entries = (columns[:, :, None] * channels + torch.arange(channels, device=images.device)).flatten(1)
    batch = batch.gather(2, entries[:, None, :].expand(-1, height, -1)).view(-1, height, width, channels)
    if cutout and fill is not None:
        top, left = moves[:, 3:4] - cutout // 2, moves[:, 4:5] - cutout // 2
        inside_rows, inside_columns = (ys >= top) & (ys < top + cutout), (xs >= left) & (xs < left + cutout)
        batch = torch.where((inside_rows[:, :, None] & inside_columns[:, None, :])[..., None], fill, batch)
    return batch


def _reflect(positions: Tensor, size: int) -> Tensor:
    """Positions outside [0, size) mirrored at the border pixel, as `reflect` padding does."""
    positions = positions.abs()
    return torch.where(positions >= size, 2 * (size - 1) - positions, positions)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 or float32 (B, H, W, C) in 0 … 255 to float32 (B, C, H, W) in channels_last memory: (x/255 - mean) / std.

    mean, std: (C,) in [0, 1] units. Floats are changed in place. Works on whole rows of pixels with tiled constants,
    which vectorises where a broadcast over 3 channels would not.
    """
    count, height, width, channels = images.shape
    scale = (1.0 / (255.0 * std)).repeat(width)
    shift = (-mean / std).repeat(width)
    rows = images.reshape(count * height, width * channels).float().mul_(scale).add_(shift)
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)
