"""Moves of pixels, with parameters per image: flips, shifts with reflection, cutouts, and crops that are scaled.

Boxes are (B, 4) of top, left, height and width in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# torchvision's defaults: random boxes to try until one fits, and their smallest and largest width / height.
TRIES = 10
RATIO = (3 / 4, 4 / 3)


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


def crop_boxes(draws: Tensor, area: Sequence[float], height: int, width: int) -> Tensor:
    """Return boxes of random crops: of `TRIES` random boxes the first that fits, else the largest central one.

    Args:
        draws: uniform, (B, 2 * TRIES + 2).
        area: smallest and largest share of the image's area.
    """
    areas = height * width * (area[0] + (area[1] - area[0]) * draws[:, :TRIES])
    ratios = (math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * draws[:, TRIES : 2 * TRIES]).exp()
    rows, columns = (areas / ratios).sqrt().round(), (areas * ratios).sqrt().round()
    fits = (rows > 0) & (rows <= height) & (columns > 0) & (columns <= width)
    first = fits.int().argmax(1, keepdim=True)
    sizes = [lengths.gather(1, first)[:, 0] for lengths in (rows, columns)]
    top = (draws[:, 2 * TRIES] * (height - sizes[0] + 1)).floor()
    left = (draws[:, 2 * TRIES + 1] * (width - sizes[1] + 1)).floor()
    shape = min(max(width / height, RATIO[0]), RATIO[1])
    most_rows, most_columns = min(height, round(width / shape)), min(width, round(height * shape))
    central = ((height - most_rows) // 2, (width - most_columns) // 2, most_rows, most_columns)
    pairs = zip((top, left, *sizes), map(float, central), strict=True)
    return torch.stack([torch.where(fits.any(1), *pair) for pair in pairs], 1)


def resized_crop(images: Tensor, boxes: Tensor) -> Tensor:
    """Crop boxes from uint8 (B, H, W, C), and scale them bilinearly to the images' own size: float32 (B, H, W, C).

    Boxes are only enlarged, so no antialiasing is needed. Rows are blended first, then columns as rows of the
    transposed images. On a CPU this takes half as long as `grid_sample`.
    """
    count, height, width, channels = images.shape
    top, left, rows, columns = boxes.unbind(1)
    blended = _scaled_rows(images.reshape(-1, width * channels), top, rows, height)
    transposed = blended.view(count, height, width, channels).permute(0, 3, 2, 1).reshape(-1, height)
    blended = _scaled_rows(transposed, left.repeat_interleave(channels), columns.repeat_interleave(channels), width)
    return blended.view(count, channels, width, height).permute(0, 3, 2, 1).contiguous()


def _scaled_rows(lines: Tensor, start: Tensor, length: Tensor, size: int) -> Tensor:
    """Scale `length` rows of each image from `start` on, both (N,), to `size` rows. lines: (N·size, columns)."""
    start, last = start[:, None], length[:, None] - 1
    positions = (torch.arange(size, device=lines.device) + 0.5) * (length / size)[:, None] - 0.5
    positions = positions.clamp_min(0).minimum(last)  # pixels outside the box do not count
    before = positions.floor()
    first = torch.arange(len(start), device=lines.device)[:, None] * size
    lower, upper = (
        lines.index_select(0, (first + (start + numbers).long()).flatten()).float()
        for numbers in (before, (before + 1).minimum(last))
    )
    return lower.lerp_(upper, (positions - before).view(-1, 1))


def cutmix_boxes(shares: Tensor, centres: Tensor, height: int, width: int) -> Tensor:
    """Return boxes with `shares` (B,) of the area, clipped at the borders. centres: uniform draws (B, 2)."""
    starts, lengths = [], []
    for axis, size in enumerate((height, width)):
        middle, half = (centres[:, axis] * size).floor(), (0.5 * shares.sqrt() * size).floor()
        starts.append((middle - half).clamp_min(0))
        lengths.append((middle + half).clamp_max(size) - starts[axis])
    return torch.stack((*starts, *lengths), 1)
