"""Augmentation of batches where they are trained on: what is set, what each image draws, and what is done in which order.

What an image draws is a function of (seed, epoch, row) alone; see `data.draws`. What is done to it: `data.transforms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.draws import beta, uniform
from cifar_lit.data.transforms import (
    BINS,
    OPERATIONS,
    SIGNED,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    apply_operations,
    crop_matrices,
    erase,
    gaussian_blur,
    image_corners,
    perspective_matrices,
    policy_magnitudes,
    resized_crop,
    rotation_matrices,
    warp,
    within,
)
from cifar_lit.errors import UsageError, check_choice, nearest

POLICIES = ("none", "trivial", "randaugment")
TRIES = 10  # boxes that are drawn until one fits, as torchvision does
ERASED_AREA, ERASED_RATIO = (
    (0.02, 0.33),
    (1 / 3.3, 1 / 0.3),
)  # torchvision's defaults (Zhong et al., 2017); width over height
CHUNK_BYTES = 1 << 22  # of floats that a CPU takes through all operations at once, so that they stay in its cache

# Least and largest value of the settings that are one number.
LIMITS: dict[str, tuple[float, float]] = {
    "brightness": (0, 4), "contrast": (0, 4), "saturation": (0, 4), "hue": (0, 0.5), "rotation": (0, 180), "perspective": (0, 1),
    "blur": (0, 16), "erasing": (0, 1), "magnitude": (0, BINS - 1), "operations": (1, 8), "mixup": (0, 100), "cutmix": (0, 100),
}  # fmt: skip
WHOLE = ("magnitude", "operations")
# Independent streams of one seed and epoch; `data.augment` has others, which begin with a number below _SEEDS.
_SEEDS = 4
_STREAMS = (
    "crop", "rotation", "perspective", "policy", "brightness", "contrast", "saturation", "hue", "blur", "erasing", "mixing",
)  # fmt: skip

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class DeviceAugmentation:
    """What happens to training images where they are trained on, in this order; UsageError for values that cannot be meant.

    All mean what torchvision's transforms of these names mean, and all are off by default.

    scale: least and largest share of the image's area that a random crop keeps, such as [0.35, 1]; it is scaled to the image's
        size. ratio: of its width to its height.
    rotation: degrees by which an image is turned at most, to either side.
    perspective: how far corners are moved inward at most, as a share of half the image, 0 … 1; of every image. Crop, rotation
        and perspective are one move of pixels, which are interpolated once.
    policy: none; trivial, TrivialAugmentWide (Müller and Hutter, 2021), one operation of any strength; randaugment (Cubuk et
        al., 2019), `operations` of them, each of the strength `magnitude`, 0 … 30.
    brightness, contrast, saturation: a factor of 1 ± that much, not below 0. hue: a turn of ± that share of the colour wheel, up
        to 0.5. In this order, which torchvision's ColorJitter draws.
    blur: largest standard deviation of a Gaussian, in pixels; each image draws from 0 on.
    erasing: probability that a box is painted with the mean colour, which also fills what a move leaves empty.
    mixup: alpha of the Beta distribution of shares, with which each image is blended with another of its batch (Zhang et al.,
        2017); cutmix: of those of a box that is pasted from another (Yun et al., 2019). Where both are set, each image draws one.
    """

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
    def from_settings(cls, settings: Mapping[str, Any]) -> DeviceAugmentation:
        """Of `data.augment`, plain values by name."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UsageError(
                    f"data.augment has no setting {name!r}.{nearest(str(name), known)} It has {', '.join(known)}."
                )
        return cls(**settings)

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most or (name in WHOLE and value != int(value)):
                kind = "a whole number" if name in WHOLE else "a number"
                raise UsageError(f"data.augment.{name} must be {kind} from {least:g} to {most:g}, not {value!r}")
        check_choice("data.augment.policy", self.policy, POLICIES)
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            value = getattr(self, name)
            if value is None:
                continue
            pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
            if not pair or not 0 < value[0] <= value[1] <= most:
                rule = (
                    "two rising shares of the area, above 0 and up to 1"
                    if name == "scale"
                    else "two rising numbers above 0"
                )
                raise UsageError(f"data.augment.{name} must be {rule}, such as [0.35, 1], not {value!r}")
        if self.ratio and not self.scale:
            raise UsageError("data.augment.ratio is of the random crop: set data.augment.scale too, such as [0.35, 1]")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others, so that targets are shares of classes."""
        return bool(self.mixup or self.cutmix)

    @property
    def blur_radius(self) -> int:
        """Pixels at which the Gaussian is cut."""
        return math.ceil(3 * self.blur)

    def check(self, height: int, width: int) -> None:
        """Raises UsageError when images of this size are too small for the settings."""
        if self.blur_radius >= min(height, width):
            raise UsageError(f"data.augment.blur {self.blur:g} is too much for {height}×{width} images: lower it")

    # ---- each image by itself

    def apply(
        self, images: Tensor, rows: Tensor, seed: int, epoch: int, fill: Tensor, finish: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Augments each image by itself, and hands it to `finish`.

        Args:
            images: uint8 (B, H, W, C).
            rows: int64 (B,), their rows in the image set, which with seed and epoch say what they draw.
            fill: float32 (C,), the colour of what is painted or left empty, in 0 … 255.
            finish: makes of float32 (B, H, W, C) in 0 … 255 what is wanted of them, each by itself, (B, …).

        Returns:
            What `finish` has made of all.
        """
        count, height, width, channels = images.shape
        parameters = self._draw(rows, seed, epoch, height, width)

        def augmented(images: Tensor, parameters: Parameters) -> Tensor:
            return finish(self._transform(images, parameters, fill).permute(0, 2, 3, 1).contiguous())

        if images.device.type != "cpu":
            return augmented(images, parameters)
        # those of the same operation side by side: a part then has few of them
        by_operation = "operations" in parameters
        order = parameters["operations"][:, 0].argsort(stable=True) if by_operation else torch.arange(count)
        memory = result = torch.empty(0)
        for part in order.split(max(1, CHUNK_BYTES // (4 * height * width * channels))):
            chosen = {name: values.index_select(0, part) for name, values in parameters.items()}
            result = augmented(images.index_select(0, part), chosen)
            numbers = result[0].numel()
            flat = result.as_strided((len(part), numbers), (numbers, 1))  # each image as it lies in memory
            memory = memory if len(memory) else flat.new_empty(count, numbers)
            memory[part if by_operation else slice(int(part[0]), int(part[-1]) + 1)] = flat
        return memory.as_strided((count, *result.shape[1:]), result.stride())

    def _draw(self, rows: Tensor, seed: int, epoch: int, height: int, width: int) -> Parameters:
        """The parameters of all operations that are on: each (B,) or (B, …)."""

        def draws(stream: str, count: int) -> Tensor:
            return uniform(rows, count, _SEEDS, seed, epoch, _STREAMS.index(stream))

        parameters: Parameters = {}
        if self.scale:
            parameters["crop"] = _crops(
                draws("crop", 2 * TRIES + 2), self.scale, self.ratio or (3 / 4, 4 / 3), height, width
            )
        if self.rotation:
            parameters["rotation"] = (2 * draws("rotation", 1)[:, 0] - 1) * self.rotation
        if self.perspective:
            numbers, corners = draws("perspective", 8).view(-1, 4, 2), image_corners(height, width, rows.device)
            bounds = (int(self.perspective * (size // 2)) + 1 for size in (width, height))
            inward = torch.stack([(numbers[..., axis] * bound).floor() for axis, bound in enumerate(bounds)], 2)
            parameters["perspective"] = (corners - inward).abs()  # from 0 on, or back from the other end
        if self.policy != "none":
            count = 1 if self.policy == "trivial" else int(self.operations)
            parameters |= self._draw_policy(draws("policy", 3 * count).view(-1, count, 3), height, width)
        for name in ("brightness", "contrast", "saturation"):
            if (value := getattr(self, name)) > 0:
                least = max(0.0, 1 - value)
                parameters[name] = least + (1 + value - least) * draws(name, 1)[:, 0]
        if self.hue:
            parameters["hue"] = (2 * draws("hue", 1)[:, 0] - 1) * self.hue
        if self.blur:
            parameters["blur"] = (draws("blur", 1)[:, 0] * self.blur).clamp_min(0.01)  # which is none
        if self.erasing:
            numbers = draws("erasing", 2 * TRIES + 3)
            boxes, fits = _boxes(numbers, ERASED_AREA, ERASED_RATIO, height, width, 1)
            parameters["erasing"] = torch.stack(boxes, 1) * (fits & (numbers[:, -1] < self.erasing))[:, None]
        return parameters

    def _draw_policy(self, draws: Tensor, height: int, width: int) -> Parameters:
        """The operations of each image and their magnitudes, both (B, operations). draws: (B, operations, 3)."""
        choices, strengths, signs = draws.unbind(2)
        operations = (choices * len(OPERATIONS)).long()
        bins = (
            (strengths * BINS).long() if self.policy == "trivial" else torch.full_like(operations, int(self.magnitude))
        )
        magnitudes = policy_magnitudes(self.policy, height, width, draws.device)[operations, bins]
        negated = (operations <= SIGNED) & (signs <= 0.5)
        return {"operations": operations, "magnitudes": torch.where(negated, -magnitudes, magnitudes)}

    def _transform(self, images: Tensor, drawn: Parameters, fill: Tensor) -> Tensor:
        """Images (B, H, W, C) through all operations that have parameters, to float32 (B, C, H, W) in 0 … 255."""
        height, width = images.shape[1:3]
        if drawn.keys() & _MOVES.keys() == {"crop"}:
            images = resized_crop(images, drawn["crop"])
        else:
            images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
            if moves := [build(drawn[name], height, width) for name, build in _MOVES.items() if name in drawn]:
                matrices = reduce(torch.matmul, moves)
                images = warp(images, matrices if "perspective" in drawn else matrices[:, :2], fill)
        if "operations" in drawn:
            for operations, magnitudes in zip(
                drawn["operations"].unbind(1), drawn["magnitudes"].unbind(1), strict=True
            ):
                images = apply_operations(images, operations, magnitudes, fill)
        for name, adjust in _COLOURS.items():
            if name in drawn:
                images = adjust(images, drawn[name])
        if "blur" in drawn:
            images = gaussian_blur(images, drawn["blur"], self.blur_radius)
        return erase(images, drawn["erasing"], fill) if "erasing" in drawn else images

    # ---- with another of the batch

    def mix(
        self, images: Tensor, labels: Tensor, classes: int, rows: Tensor, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mixes each image of a device's part of a batch with another one of it, by mixup or cutmix.

        Which one and how follows from (seed, epoch, rows): on another number of devices other images come together.

        Args:
            images: float32 (B, C, H, W) in channels_last memory; they are written to.
            labels: int64 (B,); classes: how many there are.
            rows: int64 (B,), of the image set.

        Returns:
            The images, and float32 (B, classes), the share of each class in each of them.
        """
        count, channels, height, width = images.shape
        draws = uniform(rows, 5, _SEEDS, seed, epoch, _STREAMS.index("mixing"))
        order = draws[:, 0].argsort(stable=True)
        others = torch.empty_like(order).index_copy_(0, order, order.roll(1))  # in a ring
        pastes = draws[:, 4] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        weights = torch.zeros_like(draws[:, :1, None])
        if self.mixup:
            weights = (beta(draws[:, 1], self.mixup) * ~pastes)[:, None, None]
        if self.cutmix:
            boxes = _cutmix_boxes(beta(draws[:, 1], self.cutmix) * pastes, draws[:, 2:4], height, width)
            rows_within, columns_within = within(boxes, height, width)
            # one weight for each number of a row of pixels: a broadcast over three channels would take far longer
            columns_within = columns_within.repeat_interleave(channels, 1)
            weights = weights + rows_within[:, :, None] * columns_within[:, None, :]
        pixels = images.permute(0, 2, 3, 1).reshape(count, height, width * channels)
        pixels.lerp_(pixels.index_select(0, others), weights)
        own = F.one_hot(labels, classes).float()
        targets = torch.lerp(own, own.index_select(0, others), weights.mean((1, 2))[:, None])
        return pixels.view(count, height, width, channels).permute(0, 3, 1, 2), targets


_MOVES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "crop": crop_matrices,
    "rotation": rotation_matrices,
    "perspective": perspective_matrices,
}
_COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": adjust_brightness,
    "contrast": adjust_contrast,
    "saturation": adjust_saturation,
    "hue": adjust_hue,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# In what follows no constant becomes a tensor of its own: to bring it to a GPU, the host would wait for all that runs there.


def _boxes(
    draws: Tensor, area: Sequence[float], ratio: Sequence[float], height: int, width: int, margin: int
) -> tuple[list[Tensor], Tensor]:
    """The first of some random boxes that fits into the image less `margin` pixels, as torchvision finds it.

    draws: (B, 2 * TRIES + 2) or more. area: least and largest, as a share of the image's; ratio: of width to height.

    Returns top, left, height and width, each (B,), and bool (B,), whether any fits.
    """
    areas = height * width * (area[0] + (area[1] - area[0]) * draws[:, :TRIES])
    ratios = (math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[:, TRIES : 2 * TRIES]).exp()
    rows, columns = (areas / ratios).sqrt().round(), (areas * ratios).sqrt().round()
    fits = (rows > 0) & (rows <= height - margin) & (columns > 0) & (columns <= width - margin)
    first = fits.int().argmax(1, keepdim=True)
    sizes = [each.gather(1, first)[:, 0] for each in (rows, columns)]
    places = [
        (draws[:, 2 * TRIES + axis] * (most - size + 1)).floor()
        for axis, (most, size) in enumerate(zip((height, width), sizes, strict=True))
    ]
    return [*places, *sizes], fits.any(1)


def _crops(draws: Tensor, area: Sequence[float], ratio: Sequence[float], height: int, width: int) -> Tensor:
    """Boxes (B, 4) of random crops; where none fits, the largest one in the middle whose ratio is allowed."""
    boxes, fits = _boxes(draws, area, ratio, height, width, 0)
    shape = min(max(width / height, ratio[0]), ratio[1])
    rows, columns = min(height, round(width / shape)), min(width, round(height * shape))
    middle = ((height - rows) // 2, (width - columns) // 2, rows, columns)
    return torch.stack([torch.where(fits, *pair) for pair in zip(boxes, map(float, middle), strict=True)], 1)


def _cutmix_boxes(shares: Tensor, centres: Tensor, height: int, width: int) -> Tensor:
    """Boxes (B, 4) of a share of the image's area before they are cut at its borders. centres: uniform draws (B, 2)."""
    starts, lengths = [], []
    for axis, size in enumerate((height, width)):
        middle, half = (centres[:, axis] * size).floor(), (0.5 * shares.sqrt() * size).floor()
        starts.append((middle - half).clamp_min(0))
        lengths.append((middle + half).clamp_max(size) - starts[axis])
    return torch.stack((*starts, *lengths), 1)
