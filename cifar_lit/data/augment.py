"""Augmentation of whole batches: settings, random draws, and how they are applied.

The draws of an image are a function of (seed, epoch, row) alone; see `data.draws`. An image therefore looks the same in
any order of batches, on any number of workers and devices, and after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data import operations
from cifar_lit.data.draws import WORD, beta, integers, key_words, uniform
from cifar_lit.data.moves import cut_out, flip_and_shift, within
from cifar_lit.errors import UsageError, check_choice
from cifar_lit.settings import check_names

# torchvision's defaults (Zhong et al., 2017). The ratio is width / height.
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (1 / 3.3, 1 / 0.3)
# Range of each setting that is one number.
LIMITS: dict[str, tuple[float, float]] = {
    "crop": (0, 2047), "cutout": (0, 2047), "magnitude": (0, operations.BINS - 1), "operations": (1, 8),
    "brightness": (0, 4), "contrast": (0, 4), "saturation": (0, 4), "hue": (0, 0.5), "rotation": (0, 180),
    "perspective": (0, 1), "blur": (0, 16), "erasing": (0, 1), "mixup": (0, 100), "cutmix": (0, 100),
}  # fmt: skip
WHOLE = ("crop", "cutout", "magnitude", "operations")


@dataclass(frozen=True)
class Augment:
    """Settings of the augmentation, applied in this order. All default to off.

    `flip`, `crop` and `cutout` copy uint8 pixels where the images are. All others are computed on the training device.
    Operations, ranges and probabilities are torchvision's. Interpolation and fill differ from its defaults, the nearest
    pixel and black: warps interpolate bilinearly and use the mean colour. `scale`, `rotation` and `perspective` are one
    warp, so pixels are interpolated once. The colour operations run in a fixed order, unlike in ColorJitter.

    Args:
        flip: none; random, mirrored with probability 1/2; or alternating, one random half of the images is mirrored in
            even epochs and the other half in odd ones (Jordan, airbench, 2024).
        crop: pixels of reflect padding for a random crop of the image's own size; 0 for none.
        cutout: side in pixels of a square painted with the mean colour (DeVries and Taylor, 2017); 0 for none.
        scale: smallest and largest share of the area of a random crop scaled to the image's size, such as [0.35, 1].
        ratio: smallest and largest aspect ratio (width / height) of the crop of `scale`; [3/4, 4/3] if not given.
        rotation: largest angle in degrees, to either side.
        perspective: largest inward shift of the corners, as a share of half the image, 0 … 1.
        policy: none; trivial, TrivialAugmentWide (Müller and Hutter, 2021), one operation of random magnitude; or
            randaugment (Cubuk et al., 2019), `operations` of them with the magnitude `magnitude`.
        operations: number of operations of randaugment, 1 … 8.
        magnitude: magnitude of the operations of randaugment, 0 … 30.
        brightness: factors are drawn from 1 ± this value, but not below 0.
        contrast: like brightness.
        saturation: like brightness.
        hue: largest shift, as a share of the colour wheel, 0 … 0.5.
        blur: largest standard deviation of a Gaussian in pixels. Each image draws from 0 to this value.
        erasing: probability of painting a random box with the mean colour. Warps fill areas outside the image with it.
        mixup: alpha of the Beta distribution of the blending weights (Zhang et al., 2017).
        cutmix: alpha of the Beta distribution of the areas of pasted boxes (Yun et al., 2019). With both, each image
            draws one of them.

    Raises:
        UsageError: for invalid values.
    """

    flip: str = "none"
    crop: int = 0
    cutout: int = 0
    scale: list[float] | None = None
    ratio: list[float] | None = None
    rotation: float = 0.0
    perspective: float = 0.0
    policy: str = "none"
    operations: int = 2
    magnitude: int = 9
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    blur: float = 0.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    @classmethod
    def of(cls, settings: Augment | Mapping[str, Any] | None) -> Augment:
        """Return the augmentation for settings by name; None turns all off."""
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, Mapping | None):
            raise UsageError(f"data.augment must hold settings by name, not {settings!r}")
        check_names(cls, settings or {}, "data.augment", "It has")
        return cls(**(settings or {}))

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most or (name in WHOLE and value != int(value)):
                kind = "a whole number" if name in WHOLE else "a number"
                raise UsageError(f"data.augment.{name} must be {kind} from {least:g} to {most:g}, not {value!r}")
        check_choice("data.augment.flip", self.flip, ("none", "random", "alternating"))
        check_choice("data.augment.policy", self.policy, ("none", "trivial", "randaugment"))
        _check_range("scale", self.scale, 1.0, "two rising shares of the area, above 0 and up to 1")
        _check_range("ratio", self.ratio, math.inf, "two rising numbers above 0")
        if self.ratio and not self.scale:
            raise UsageError("data.augment.ratio needs a random crop: set data.augment.scale too, such as [0.35, 1]")

    @property
    def computes(self) -> bool:
        """Whether anything but `flip`, `crop` and `cutout` is set."""
        moves = Augment(flip=self.flip, crop=self.crop, cutout=self.cutout)
        if self.policy == "none":  # its settings have no effect
            moves = replace(moves, operations=self.operations, magnitude=self.magnitude)
        return self != moves

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, so that targets are shares of classes."""
        return bool(self.mixup or self.cutmix)

    def check(self, height: int, width: int) -> None:
        """Raise UsageError if images of this size are too small for the settings."""
        for name, size in (("crop", self.crop), ("cutout", self.cutout), ("blur", math.ceil(3 * self.blur))):
            if size >= min(height, width):
                fault = f"data.augment.{name} {getattr(self, name):g} is too large"
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

    def draw(self, rows: Tensor, seed: int, epoch: int, height: int, width: int) -> dict[str, Tensor]:
        """Return the parameters of the float operations for `operations.transform`. rows: int64 (B,)."""

        def draws(stream: str, count: int = 1) -> Tensor:
            return uniform(rows, count, stream, seed, epoch)

        ranges = {"rotation": (-self.rotation, self.rotation), "hue": (-self.hue, self.hue), "blur": (1e-3, self.blur)}
        for name in ("brightness", "contrast", "saturation"):
            ranges[name] = (max(0.0, 1 - getattr(self, name)), 1 + getattr(self, name))
        drawn = {}
        for name, (least, most) in ranges.items():
            if getattr(self, name):
                drawn[name] = least + (most - least) * draws(name)[:, 0]
        if self.scale:
            numbers, ratio = draws("crop", 2 * operations.TRIES + 2), self.ratio or (3 / 4, 4 / 3)
            drawn["crop"] = operations.crop_boxes(numbers, self.scale, ratio, height, width)
        if self.perspective:
            bounds = [int(self.perspective * (size // 2)) + 1 for size in (width, height)]
            x, y = draws("perspective", 8).view(-1, 4, 2).unbind(2)
            inward = torch.stack(((x * bounds[0]).floor(), (y * bounds[1]).floor()), 2)
            # Coordinates at 0 increase by `inward`; coordinates at the far end decrease by it.
            drawn["perspective"] = (operations.image_corners(height, width, rows.device) - inward).abs()
        if self.erasing:
            numbers = draws("erasing", 2 * operations.TRIES + 3)
            boxes, fits = operations.random_boxes(numbers, ERASED_AREA, ERASED_RATIO, height, width, margin=1)
            drawn["erasing"] = torch.stack(boxes, 1) * (fits & (numbers[:, -1] < self.erasing))[:, None]
        if self.policy != "none":
            count = 1 if self.policy == "trivial" else int(self.operations)
            choices, strengths, signs = draws("policy", 3 * count).view(-1, count, 3).unbind(2)
            numbers = (choices * len(operations.OPERATIONS)).long()
            bins = torch.full_like(numbers, int(self.magnitude))
            if self.policy == "trivial":
                bins = (strengths * operations.BINS).long()
            magnitudes = operations.policy_magnitudes(self.policy, height, width, rows.device)[numbers, bins]
            is_negative = (numbers <= operations.SIGNED) & (signs <= 0.5)
            drawn |= {"operations": numbers, "magnitudes": torch.where(is_negative, -magnitudes, magnitudes)}
        return drawn

    def mix(
        self, images: Tensor, labels: Tensor, classes: int, rows: Tensor, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix each image with another one of this device's part of the batch; return images and shares of classes.

        The pairs are a function of (seed, epoch, rows), and therefore depend on the number of devices. The shares are
        float32 (B, classes).

        Args:
            images: float32 (B, C, H, W) in channels_last memory; changed in place.
            labels, rows: int64 (B,), rows of the image set.
        """
        count, channels, height, width = images.shape
        place, size, top, left, kind, angle = uniform(rows, 6, "mixing", seed, epoch).unbind(1)
        order = place.argsort(stable=True)
        partners = torch.empty_like(order).index_copy_(0, order, order.roll(1))  # the next image in a random ring
        paste_share = 0.0
        if self.cutmix:
            paste_share = 1.0
        if self.mixup and self.cutmix:
            paste_share = 0.5
        is_paste = kind < paste_share
        weights = torch.zeros_like(place[:, None, None])
        if self.mixup:
            weights = (beta(size, angle, self.mixup) * ~is_paste)[:, None, None]
        if self.cutmix:
            shares = beta(size, angle, self.cutmix) * is_paste
            boxes = operations.cutmix_boxes(shares, torch.stack((top, left), 1), height, width)
            rows_within, columns_within = within(boxes, height, width)
            # One weight for each value of a row of pixels. Broadcasting over 3 channels is far slower.
            columns_within = columns_within.repeat_interleave(channels, 1)
            weights = weights + (rows_within.float()[:, :, None] * columns_within.float()[:, None, :])
        pixels = images.permute(0, 2, 3, 1).reshape(count, height, width * channels)
        pixels.lerp_(pixels.index_select(0, partners), weights)
        one_hot = F.one_hot(labels, classes).float()
        targets = torch.lerp(one_hot, one_hot.index_select(0, partners), weights.mean((1, 2))[:, None])
        return pixels.view(count, height, width, channels).permute(0, 3, 1, 2), targets


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_range(name: str, value: Any, most: float, rule: str) -> None:
    """Raise UsageError unless `value` is None or two rising numbers above 0 and up to `most`."""
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
    if value is not None and not (is_pair and 0 < value[0] <= value[1] <= most):
        raise UsageError(f"data.augment.{name} must be {rule}, such as [0.35, 1], not {value!r}")
