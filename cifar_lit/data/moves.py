"""Moves of uint8 pixels, with parameters per image: flips, shifts with reflection, and cutouts."""

from __future__ import annotations

import torch
from torch import Tensor


def flip_and_shift(
    images: Tensor, rows: Tensor, flips: Tensor | None, down: Tensor | None, right: Tensor | None
) -> Tensor:
    """Return the images at `rows`, flipped, then cropped from their reflect-padded version: uint8 (B, H, W, C).

    Args:
        images: uint8 (N, H, W, C), contiguous.
        rows: int64 (B,).
        flips: int64 (B,), 1 for images to mirror; None for no flips.
        down, right: int64 (B,), first row and column of the crop, may be negative; None for no crops.
    """
    _, height, width, channels = images.shape
    if down is None:
        batch = images.index_select(0, rows)
    else:
        lines = torch.add(_reflected(down, height), rows[:, None], alpha=height)
        batch = images.view(-1, width * channels).index_select(0, lines.flatten())
    if flips is not None:
        # Reflection at column 0 turns x - (width - 1) into the mirrored column.
        right = flips * (1 - width) if right is None else torch.add(right, flips, alpha=1 - width)
    if right is not None:
        columns = _reflected(right, width)[:, :, None]
        values = torch.add(torch.arange(channels, device=images.device), columns, alpha=channels).flatten(1)
        batch = batch.view(-1, height, width * channels)
        batch = batch.gather(2, values[:, None, :].expand(-1, height, -1))
    return batch.view(-1, height, width, channels)


def cut_out(images: Tensor, rows: Tensor, columns: Tensor, side: int, fill: Tensor) -> Tensor:
    """Paint squares of `side` pixels with centres `rows`, `columns`, int64 (B,), in the colour `fill`, uint8 (C,)."""
    sides = torch.full_like(rows, side)
    boxes = torch.stack((rows - side // 2, columns - side // 2, sides, sides), 1)
    rows, columns = within(boxes, *images.shape[1:3])
    return torch.where((rows[:, :, None] & columns[:, None, :])[..., None], fill, images)


def within(boxes: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which rows (B, height) and columns (B, width) are in boxes (B, 4) of top, left, height and width."""
    top, left, rows, columns = boxes.split(1, dim=1)
    ys, xs = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    return (ys >= top) & (ys < top + rows), (xs >= left) & (xs < left + columns)


def _reflected(start: Tensor, size: int) -> Tensor:
    """Return `size` positions from each `start` (B,), mirrored at the border pixels: (B, size)."""
    positions = (start[:, None] + torch.arange(size, device=start.device)).abs_()
    return torch.minimum(positions, 2 * (size - 1) - positions)
