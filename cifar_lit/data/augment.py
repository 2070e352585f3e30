"""Random crop, flip and cutout of whole batches, drawn per image as a function of (seed, epoch, image index).

A plan holds the draws for every training image of an epoch. An image therefore looks the same in any order of batches,
on any number of workers and devices, and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cifar_lit.errors import UsageError, check_choice

FLIPS = ("none", "random", "alternating")

_MOVES, _FIRST_FLIP = 2, 3  # numbers of random streams; `data.order` has 1, `data.balanced` has 0


@dataclass(frozen=True)
class Augmentation:
    """Random crop, flip and cutout of training images.

    Args:
        crop: pixels of reflect padding on every side. A window of the image's own size is then cut at random.
        flip: "none"; "random", mirrored with probability 1/2; or "alternating", one random half of the images is
            mirrored in even epochs and the other half in odd ones (Jordan, airbench, 2024).
        cutout: side in pixels of a square painted with `fill` at a random place (DeVries and Taylor, 2017); 0 for none.

    Raises:
        UsageError: for invalid values.
    """

    crop: int = 0
    flip: str = "none"
    cutout: int = 0

    def __post_init__(self) -> None:
        check_choice("data.flip", self.flip, FLIPS)
        if self.crop < 0 or self.cutout < 0:
            raise UsageError("data.crop and data.cutout are numbers of pixels, 0 or more")

    def check(self, height: int, width: int) -> None:
        """Raise UsageError if images of this size are too small for the settings."""
        side = min(height, width)
        for name, value in (("cutout", self.cutout), ("crop", self.crop)):
            if value >= side:
                raise UsageError(f"data.{name} {value} is too large for {height}×{width} images: use less than {side}")

    def plan(self, count: int, height: int, width: int, seed: int, epoch: int) -> Tensor | None:
        """Draw for every image: int32 (count, 5) of row shift, column shift, flip, cutout row, cutout column.

        Shifts are in [-crop, crop], flip is 0 or 1, cutouts are given by their centre. None without augmentation.
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


def augment_batch(
    images: Tensor, indices: Tensor, plan: Tensor | None, cutout: int = 0, fill: Tensor | None = None
) -> Tensor:
    """Return a batch augmented by its rows of the plan: uint8 (B, H, W, C), contiguous.

    Args:
        images: uint8 (N, H, W, C), contiguous.
        indices: int64 (B,), rows of the batch.
        plan: int32 (N, 5) from `Augmentation.plan`, or None.
        cutout: side of the painted square in pixels.
        fill: uint8 (C,), colour of the square.
    """
    if plan is None:
        return images.index_select(0, indices)
    _, height, width, channels = images.shape
    moves = plan.index_select(0, indices).long()
    ys = torch.arange(height, device=images.device)
    xs = torch.arange(width, device=images.device)
    # Copy whole rows, cropped vertically. Then gather columns with crop and flip in one index.
    rows = _reflect(ys + moves[:, 0:1], height) + indices[:, None] * height
    batch = images.view(-1, width * channels).index_select(0, rows.flatten())
    batch = batch.view(len(indices), height, width * channels)
    mirrored = torch.where(moves[:, 2:3] == 1, width - 1 - xs, xs)
    columns = _reflect(mirrored + moves[:, 1:2], width)
    entries = (columns[:, :, None] * channels + torch.arange(channels, device=images.device)).flatten(1)
    batch = batch.gather(2, entries[:, None, :].expand(-1, height, -1)).view(-1, height, width, channels)
    if cutout and fill is not None:
        top, left = moves[:, 3:4] - cutout // 2, moves[:, 4:5] - cutout // 2
        inside_rows = (ys >= top) & (ys < top + cutout)
        inside_columns = (xs >= left) & (xs < left + cutout)
        inside = inside_rows[:, :, None] & inside_columns[:, None, :]
        batch = torch.where(inside[..., None], fill, batch)
    return batch


def _reflect(positions: Tensor, size: int) -> Tensor:
    """Mirror positions outside [0, size) at the border pixel, like `reflect` padding."""
    positions = positions.abs()
    return torch.where(positions >= size, 2 * (size - 1) - positions, positions)
