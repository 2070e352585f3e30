"""Augmentation of whole batches: settings, random draws, and how they are applied.

The draws of an image are a function of (seed, epoch, row) alone; see `data.draws`. An image therefore looks the same in
any order of batches, on any number of workers and devices, and after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError, check_choice

# Classes of torchvision.transforms.v2 with their arguments, by the values of `transform`.
TRANSFORMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "trivial_augment_wide": ("TrivialAugmentWide", ()),
    "rand_augment": ("RandAugment", ()),
    "auto_augment": ("AutoAugment", ()),
    "colour_jitter": ("ColorJitter", (0.4, 0.4, 0.4, 0.1)),  # brightness, contrast, saturation, hue
}


@dataclass(frozen=True)
class Augment:
    """Settings of the augmentation. All default to off.

    The order is `flip`, `crop`, `cutout`, `transform`, `scale`, `mixup` and `cutmix`. All but `transform` work on whole
    batches. `transform` works on one image after the other: 0.2 to 0.6 ms for 32×32 pixels on a CPU core, 1 to 6 ms for
    224×224.

    Args:
        flip: none; random, mirrored with probability 1/2; or alternating, one random half of the images is mirrored in
            even epochs and the other half in odd ones (Jordan, airbench, 2024).
        crop: pixels of reflect padding for a random crop of the image's own size; 0 for none.
        cutout: side in pixels of a square painted with the mean colour (DeVries and Taylor, 2017); 0 for none.
        transform: none, or a policy of torchvision with its defaults: trivial_augment_wide (Müller and Hutter, 2021),
            rand_augment (Cubuk et al., 2019), auto_augment (Cubuk et al., 2018, as found for ImageNet), or
            colour_jitter (brightness, contrast and saturation by up to 0.4, hue by up to 0.1).
        scale: smallest and largest share of the area of a random crop scaled to the image's size, such as [0.35, 1].
        mixup: alpha of the Beta distribution of the blending weights (Zhang et al., 2017).
        cutmix: alpha of the Beta distribution of the areas of pasted boxes (Yun et al., 2019). With both, each image
            draws one of them.

    Raises:
        UsageError: for invalid values.
    """

    flip: str = "none"
    crop: int = 0
    cutout: int = 0
    transform: str = "none"
    scale: list[float] | None = None
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        check_choice("data.augment.flip", self.flip, ("none", "random", "alternating"))
        check_choice("data.augment.transform", self.transform, ("none", *TRANSFORMS))
        for name in ("crop", "cutout", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise UsageError(f"data.augment.{name} must be 0 or more, not {getattr(self, name)}")
        if self.scale is not None:
            least, most = self.scale
            if not 0 < least <= most <= 1:
                fault = f"two rising shares of the area, such as [0.35, 1], not {self.scale}"
                raise UsageError(f"data.augment.scale must be {fault}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, so that targets are shares of classes."""
        return bool(self.mixup or self.cutmix)

    def check(self, height: int, width: int) -> None:
        """Raise UsageError if images of this size are too small for the settings."""
        for name, size in (("crop", self.crop), ("cutout", self.cutout)):
            if size >= min(height, width):
                fault = f"data.augment.{name} {size} is too large"
                raise UsageError(f"{fault} for {height}×{width} images: lower it")

    def move_keys(self, height: int, width: int, seed: int, epoch: int) -> Tensor | None:
        """Return the keys of an epoch's draws of `flip`, `crop` and `cutout`, see `integers`; None without them."""
        keys = []
        for stream, values in self._move_values(height, width).items():
            if stream == "flip" and self.flip == "alternating":
                first, second = key_words(stream, seed, 0)  # the same halves in all epochs
                if epoch % 2:
                    second ^= WORD  # inverts the bits of every draw, which swaps the halves
            else:
                first, second = key_words(stream, seed, epoch)
            keys.append((first, second, len(values), values.start))
        return torch.tensor(keys).T.contiguous() if keys else None

    def _move_values(self, height: int, width: int) -> dict[str, range]:
        """Return the values that may be drawn, by stream."""
        values = {}
        if self.flip != "none":
            values["flip"] = range(2)
        if self.crop:
            values["row shift"] = values["column shift"] = range(-self.crop, self.crop + 1)
        if self.cutout:
            values |= {"cutout row": range(height), "cutout column": range(width)}
        return values

    def move(self, images: Tensor, rows: Tensor, keys: Tensor | None, fill: Tensor) -> Tensor:
        """Return the images at `rows`, flipped, cropped and cut out: uint8 (B, H, W, C).

        Args:
            images: uint8 (N, H, W, C), contiguous.
            rows: int64 (B,), rows of the image set.
            keys: result of `move_keys`, on the device of the images.
            fill: uint8 (C,), colour of cutouts.
        """
        if keys is None:
            return images.index_select(0, rows)
        drawn = dict(zip(self._move_values(*images.shape[1:3]), integers(rows, keys).unbind(1), strict=True))
        batch = flip_and_shift(images, rows, drawn.get("flip"), drawn.get("row shift"), drawn.get("column shift"))
        if self.cutout:
            batch = cut_out(batch, drawn["cutout row"], drawn["cutout column"], self.cutout, fill)
        return batch

    def change(self, images: Tensor, rows: Tensor, seed: int, epoch: int) -> Tensor:
        """Return images, uint8 (B, H, W, C), after `transform` and `scale`: uint8, or float32 if scaled, in 0 … 255.

        rows: int64 (B,), rows of the image set.
        """
        if self.transform != "none":
            images = transformed(images, self.transform, rows, seed, epoch)
        if self.scale:
            draws = uniform(rows, 2 * TRIES + 2, "crop", seed, epoch)
            images = resized_crop(images, crop_boxes(draws, self.scale, *images.shape[1:3]))
        return images

    def mix(
        self, images: Tensor, labels: Tensor, classes: int, rows: Tensor, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix each image with another one of this device's part of the batch; return images and shares of classes.

        The pairs are a function of (seed, epoch, rows), and therefore depend on the number of devices. The shares are
        float32 (B, classes).

        Args:
            images: float32 (B, C, H, W) in channels_last memory; changed in place.
            labels: int64 (B,), or float32 (B, classes) as in `ImageSet`.
            rows: int64 (B,), rows of the image set.
        """
        count, channels, height, width = images.shape
        place, size, top, left, kind, angle = uniform(rows, 6, "mixing", seed, epoch).unbind(1)
        order = place.argsort(stable=True)
        partners = torch.empty_like(order).index_copy_(0, order, order.roll(1))  # the next image in a random ring
        paste_share = 0.0
        if self.cutmix:
            paste_share = 1.0
            if self.mixup:
                paste_share = 0.5
        is_paste = kind < paste_share
        weights = torch.zeros_like(place[:, None, None])
        if self.mixup:
            weights = (beta(size, angle, self.mixup) * ~is_paste)[:, None, None]
        if self.cutmix:
            shares = beta(size, angle, self.cutmix) * is_paste
            boxes = cutmix_boxes(shares, torch.stack((top, left), 1), height, width)
            rows_within, columns_within = within(boxes, height, width)
            # One weight for each value of a row of pixels. Broadcasting over 3 channels is far slower.
            columns_within = columns_within.repeat_interleave(channels, 1)
            weights = weights + (rows_within.float()[:, :, None] * columns_within.float()[:, None, :])
        pixels = images.permute(0, 2, 3, 1).reshape(count, height, width * channels)
        pixels.lerp_(pixels.index_select(0, partners), weights)
        own = labels
        if labels.ndim == 1:
            own = F.one_hot(labels, classes).float()
        others = own.index_select(0, partners)
        targets = torch.lerp(own, others, weights.mean((1, 2))[:, None])
        if labels.ndim == 2:
            targets = targets.masked_fill((own < 0) | (others < 0), -1.0)  # unknown in one of the two images
        return pixels.view(count, height, width, channels).permute(0, 3, 1, 2), targets


@lru_cache
def _policy(name: str) -> Callable[[Tensor], Tensor]:
    """Return a policy of torchvision: a function of an image, uint8 (C, H, W)."""
    from torchvision.transforms import v2  # slow to import

    kind, arguments = TRANSFORMS[name]
    policy: Callable[[Tensor], Tensor] = getattr(v2, kind)(*arguments)
    return policy


def transformed(images: Tensor, name: str, rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return images, uint8 (B, H, W, C), each changed by a policy of `TRANSFORMS`. rows: int64 (B,)."""
    policy = _policy(name)
    first, second = key_words("transform", seed, epoch)
    seeds = integers(rows, torch.tensor([[first], [second], [WORD], [0]], device=rows.device))[:, 0]
    result = torch.empty_like(images)
    with torch.random.fork_rng(devices=[]):  # the policies draw from torch's generator of the CPU
        for place, image_seed in enumerate(seeds.tolist()):
            torch.default_generator.manual_seed(image_seed)
            result[place] = policy(images[place].permute(2, 0, 1)).permute(1, 2, 0)
    return result


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


WORD = 0xFFFFFFFF  # all bits of a word


def uniform(rows: Tensor, count: int, stream: str, seed: int, epoch: int) -> Tensor:
    """Draw numbers in [0, 1), float32 (B, count), each a function of the other arguments, its row and its column alone.

    Args:
        rows: int64 (B,), in 0 … 2³² - 1.
        count: numbers per row.
        stream: name of what is drawn. Streams are independent.
    """
    row_word, column_word = key_words(stream, seed, epoch)
    columns = torch.arange(count, device=rows.device)
    words = _mix(_mix(rows ^ row_word)[:, None] ^ _mix(columns ^ column_word))
    return (words >> 8).float() * 2.0**-24  # a float32 holds 24 bits


def integers(rows: Tensor, keys: Tensor) -> Tensor:
    """Draw whole numbers, int64 (B, n), each a function of its row and its column of `keys`. CUDA graphs can replay it.

    Args:
        rows: int64 (B,), in 0 … 2³² - 1.
        keys: int64 (4, n): for each number two words, the count of possible values, and the lowest value.
    """
    first, second, counts, lowest = keys.unbind()
    words = _mix(rows[:, None] ^ first) ^ second
    return (words * counts >> 32) + lowest


def beta(draws: Tensor, angles: Tensor, alpha: float) -> Tensor:
    """Transform two uniform draws to the Beta(alpha, alpha) distribution (Devroye, 1996).

    With Student's t of 2·alpha degrees of freedom (Bailey, 1994), it is that of (1 + t / √(2·alpha + t²)) / 2.
    """
    t = torch.expm1(-draws.log() / alpha).sqrt() * (2 * math.pi * angles).cos()  # divided by √(2·alpha)
    return (1 + t.atan().sin()) / 2


@lru_cache
def key_words(stream: str, seed: int, epoch: int) -> tuple[int, int]:
    """Return two words of a key. Arguments: see `uniform`."""
    first, second = np.random.SeedSequence((seed, epoch, int.from_bytes(stream.encode()))).generate_state(2)
    return int(first), int(second)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ (words >> 16)) * 0x85EBCA6B & WORD  # int64 overflow does not reach the low 32 bits
    words = (words ^ (words >> 13)) * 0xC2B2AE35 & WORD
    return words ^ (words >> 16)
