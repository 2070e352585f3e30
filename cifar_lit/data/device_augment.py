"""Augmentation of whole batches on the training device: settings, draws, operations and their order.

The draws of an image are a function of (seed, epoch, row) alone; see `data.draws`. The operations are float32 versions
of torchvision's functions of the same names, with parameters per image. torchvision rounds to whole levels after each
operation; this module does not. Most operations avoid boolean masks, which take ten times as long as additions on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.draws import beta, uniform
from cifar_lit.errors import UsageError, check_choice, nearest

POLICIES = ("none", "trivial", "randaugment")
# torchvision's TrivialAugmentWide and RandAugment have these operations, in this order.
OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
SIGNED = 9  # operations 1 … 9 may have a negative magnitude
BINS = 31  # magnitudes of an operation
TRIES = 10  # random boxes to try until one fits, as in torchvision
# torchvision's defaults (Zhong et al., 2017). The ratio is width / height.
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (1 / 3.3, 1 / 0.3)
CHUNK_BYTES = 1 << 22  # float32; a CPU works in chunks that stay in its cache

# Range of each setting that is one number.
LIMITS: dict[str, tuple[float, float]] = {
    "brightness": (0, 4), "contrast": (0, 4), "saturation": (0, 4), "hue": (0, 0.5), "rotation": (0, 180),
    "perspective": (0, 1), "blur": (0, 16), "erasing": (0, 1), "magnitude": (0, BINS - 1), "operations": (1, 8),
    "mixup": (0, 100), "cutmix": (0, 100),
}  # fmt: skip
WHOLE = ("magnitude", "operations")
# Independent random streams of one seed and epoch. The streams of `data.augment` begin with a number below _SEEDS.
_SEEDS = 4
_STREAMS = (
    "crop", "rotation", "perspective", "policy", "brightness", "contrast", "saturation", "hue", "blur", "erasing",
    "mixing",
)  # fmt: skip

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class DeviceAugmentation:
    """Settings of the augmentation, applied in this order. All default to off.

    Operations, ranges and probabilities are torchvision's. Interpolation and fill differ from its defaults: there
    `rotation` and `policy` take the nearest pixel, and areas outside the image are black, also with `perspective`. Here
    all warps interpolate bilinearly and use the mean colour. Crop, rotation and perspective are one warp, so pixels are
    interpolated once. The colour operations run in a fixed order, unlike in ColorJitter, without rounding in between.

    Args:
        scale: smallest and largest share of the area that a random crop keeps, such as [0.35, 1]. The crop is scaled to
            the image's size.
        ratio: smallest and largest aspect ratio (width / height) of the crop; [3/4, 4/3] if not given.
        rotation: largest angle in degrees, to either side.
        perspective: largest inward shift of the corners, as a share of half the image, 0 … 1.
        policy: "none"; "trivial", TrivialAugmentWide (Müller and Hutter, 2021), one operation of random magnitude; or
            "randaugment" (Cubuk et al., 2019), `operations` of them with the magnitude `magnitude`.
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
        """Return the augmentation for the settings by name in `data.augment`."""
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in names:
                fault = f"data.augment has no setting {name!r}.{nearest(str(name), names)}"
                raise UsageError(f"{fault} It has {', '.join(names)}.")
        return cls(**settings)

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most or (name in WHOLE and value != int(value)):
                kind = "a whole number" if name in WHOLE else "a number"
                raise UsageError(f"data.augment.{name} must be {kind} from {least:g} to {most:g}, not {value!r}")
        check_choice("data.augment.policy", self.policy, POLICIES)
        _check_range("scale", self.scale, 1.0, "two rising shares of the area, above 0 and up to 1")
        _check_range("ratio", self.ratio, math.inf, "two rising numbers above 0")
        if self.ratio and not self.scale:
            raise UsageError("data.augment.ratio needs a random crop: set data.augment.scale too, such as [0.35, 1]")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, so that targets are shares of classes."""
        return bool(self.mixup or self.cutmix)

    @property
    def blur_radius(self) -> int:
        """Radius of the blur kernel in pixels."""
        return math.ceil(3 * self.blur)

    def check(self, height: int, width: int) -> None:
        """Raise UsageError if images of this size are too small for the settings."""
        if self.blur_radius >= min(height, width):
            raise UsageError(f"data.augment.blur {self.blur:g} is too much for {height}×{width} images: lower it")

    # ---- images one by one

    def apply(
        self, images: Tensor, rows: Tensor, seed: int, epoch: int, fill: Tensor, finish: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Augment images one by one and pass them to `finish`.

        Args:
            images: uint8 (B, H, W, C).
            rows, seed, epoch: key of the draws; rows of the image set, int64 (B,).
            fill: float32 (C,) in 0 … 255, colour of erased boxes and of areas outside the image.
            finish: function from float32 (B, H, W, C) in 0 … 255 to (B, …), applied to each image independently.

        Returns:
            The results of `finish`.
        """
        count, height, width, channels = images.shape
        parameters = self._draw(rows, seed, epoch, height, width)

        def augmented(images: Tensor, parameters: Parameters) -> Tensor:
            return finish(self._transform(images, parameters, fill).permute(0, 2, 3, 1).contiguous())

        if images.device.type != "cpu":
            return augmented(images, parameters)
        # Sort by operation, so that each chunk has few different operations.
        is_sorted = "operations" in parameters
        order = parameters["operations"][:, 0].argsort(stable=True) if is_sorted else torch.arange(count)
        results = result = torch.empty(0)
        for part in order.split(max(1, CHUNK_BYTES // (4 * height * width * channels))):
            chunk = {name: values.index_select(0, part) for name, values in parameters.items()}
            result = augmented(images.index_select(0, part), chunk)
            size = result[0].numel()
            flat = result.as_strided((len(part), size), (size, 1))  # one row per image, in memory order
            results = results if len(results) else flat.new_empty(count, size)
            results[part if is_sorted else slice(int(part[0]), int(part[-1]) + 1)] = flat
        return results.as_strided((count, *result.shape[1:]), result.stride())

    def _draw(self, rows: Tensor, seed: int, epoch: int, height: int, width: int) -> Parameters:
        """Return the parameters of all enabled operations, each (B,) or (B, …)."""

        def draws(stream: str, count: int) -> Tensor:
            return uniform(rows, count, _SEEDS, seed, epoch, _STREAMS.index(stream))

        parameters: Parameters = {}
        if self.scale:
            ratio = self.ratio or (3 / 4, 4 / 3)
            parameters["crop"] = _crops(draws("crop", 2 * TRIES + 2), self.scale, ratio, height, width)
        if self.rotation:
            parameters["rotation"] = (2 * draws("rotation", 1)[:, 0] - 1) * self.rotation
        if self.perspective:
            shares = draws("perspective", 8).view(-1, 4, 2)
            bounds = (int(self.perspective * (size // 2)) + 1 for size in (width, height))
            inward = torch.stack([(shares[..., axis] * bound).floor() for axis, bound in enumerate(bounds)], 2)
            # Coordinates at 0 increase by `inward`; coordinates at the far end decrease by it.
            parameters["perspective"] = (image_corners(height, width, rows.device) - inward).abs()
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
            parameters["blur"] = (draws("blur", 1)[:, 0] * self.blur).clamp_min(0.01)  # 0.01 pixels do not blur
        if self.erasing:
            numbers = draws("erasing", 2 * TRIES + 3)
            boxes, fits = _boxes(numbers, ERASED_AREA, ERASED_RATIO, height, width, margin=1)
            parameters["erasing"] = torch.stack(boxes, 1) * (fits & (numbers[:, -1] < self.erasing))[:, None]
        return parameters

    def _draw_policy(self, draws: Tensor, height: int, width: int) -> Parameters:
        """Return operations and magnitudes, both (B, operations), from draws (B, operations, 3)."""
        choices, strengths, signs = draws.unbind(2)
        operations = (choices * len(OPERATIONS)).long()
        bins = torch.full_like(operations, int(self.magnitude))
        if self.policy == "trivial":
            bins = (strengths * BINS).long()
        magnitudes = policy_magnitudes(self.policy, height, width, draws.device)[operations, bins]
        is_negative = (operations <= SIGNED) & (signs <= 0.5)
        return {"operations": operations, "magnitudes": torch.where(is_negative, -magnitudes, magnitudes)}

    def _transform(self, images: Tensor, drawn: Parameters, fill: Tensor) -> Tensor:
        """Apply all operations in `drawn` to (B, H, W, C); return float32 (B, C, H, W) in 0 … 255."""
        height, width = images.shape[1:3]
        if drawn.keys() & _MOVES.keys() == {"crop"}:
            images = resized_crop(images, drawn["crop"])
        else:
            images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
            if moves := [build(drawn[name], height, width) for name, build in _MOVES.items() if name in drawn]:
                matrices = reduce(torch.matmul, moves)
                images = warp(images, matrices if "perspective" in drawn else matrices[:, :2], fill)
        if "operations" in drawn:
            for operations, magnitudes in zip(drawn["operations"].T, drawn["magnitudes"].T, strict=True):
                images = apply_operations(images, operations, magnitudes, fill)
        for name, adjust in _COLOURS.items():
            if name in drawn:
                images = adjust(images, drawn[name])
        if "blur" in drawn:
            images = gaussian_blur(images, drawn["blur"], self.blur_radius)
        return erase(images, drawn["erasing"], fill) if "erasing" in drawn else images

    # ---- images mixed with others

    def mix(
        self, images: Tensor, labels: Tensor, classes: int, rows: Tensor, seed: int, epoch: int
    ) -> tuple[Tensor, Tensor]:
        """Mix each image with another image of this device's part of the batch, by mixup or cutmix.

        The pairs are a function of (seed, epoch, rows), and therefore depend on the number of devices.

        Args:
            images: float32 (B, C, H, W) in channels_last memory; changed in place.
            labels: int64 (B,).
            classes: number of classes.
            rows, seed, epoch: key of the draws; rows of the image set, int64 (B,).

        Returns:
            The images, and float32 (B, classes), the share of each class in each image.
        """
        count, channels, height, width = images.shape
        draws = uniform(rows, 5, _SEEDS, seed, epoch, _STREAMS.index("mixing"))
        order = draws[:, 0].argsort(stable=True)
        partners = torch.empty_like(order).index_copy_(0, order, order.roll(1))  # the next image in a random ring
        is_paste = draws[:, 4] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        weights = torch.zeros_like(draws[:, :1, None])
        if self.mixup:
            weights = (beta(draws[:, 1], self.mixup) * ~is_paste)[:, None, None]
        if self.cutmix:
            boxes = _cutmix_boxes(beta(draws[:, 1], self.cutmix) * is_paste, draws[:, 2:4], height, width)
            rows_within, columns_within = within(boxes, height, width)
            # One weight for each value of a row of pixels. Broadcasting over 3 channels is far slower.
            columns_within = columns_within.repeat_interleave(channels, 1)
            weights = weights + rows_within[:, :, None] * columns_within[:, None, :]
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


# ---- boxes: (B, 4) of top, left, height and width in pixels
#
# Constants below stay Python numbers: copying a tensor to a GPU would synchronise the host.


def _boxes(
    draws: Tensor, area: Sequence[float], ratio: Sequence[float], height: int, width: int, margin: int
) -> tuple[list[Tensor], Tensor]:
    """Return the first of `TRIES` random boxes that fits, and whether any fits, bool (B,), as in torchvision.

    Args:
        draws: uniform, (B, 2 * TRIES + 2) or more columns.
        area: smallest and largest share of the image's area.
        ratio: smallest and largest width / height.
        height, width: size of the image.
        margin: pixels by which a box must be smaller than the image.
    """
    areas = height * width * (area[0] + (area[1] - area[0]) * draws[:, :TRIES])
    ratios = (math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[:, TRIES : 2 * TRIES]).exp()
    rows, columns = (areas / ratios).sqrt().round(), (areas * ratios).sqrt().round()
    fits = (rows > 0) & (rows <= height - margin) & (columns > 0) & (columns <= width - margin)
    first = fits.int().argmax(1, keepdim=True)
    sizes = [lengths.gather(1, first)[:, 0] for lengths in (rows, columns)]
    starts = [
        (draws[:, 2 * TRIES + axis] * (most - size + 1)).floor()
        for axis, (most, size) in enumerate(zip((height, width), sizes, strict=True))
    ]
    return [*starts, *sizes], fits.any(1)


def _crops(draws: Tensor, area: Sequence[float], ratio: Sequence[float], height: int, width: int) -> Tensor:
    """Return boxes (B, 4) of random crops. If none fits, use the largest central box with an allowed ratio."""
    boxes, fits = _boxes(draws, area, ratio, height, width, margin=0)
    shape = min(max(width / height, ratio[0]), ratio[1])
    rows, columns = min(height, round(width / shape)), min(width, round(height * shape))
    central = ((height - rows) // 2, (width - columns) // 2, rows, columns)
    return torch.stack([torch.where(fits, *pair) for pair in zip(boxes, map(float, central), strict=True)], 1)


def _cutmix_boxes(shares: Tensor, centres: Tensor, height: int, width: int) -> Tensor:
    """Return boxes (B, 4) with `shares` (B,) of the area, clipped at the borders. centres: uniform draws (B, 2)."""
    starts, lengths = [], []
    for axis, size in enumerate((height, width)):
        middle, half = (centres[:, axis] * size).floor(), (0.5 * shares.sqrt() * size).floor()
        starts.append((middle - half).clamp_min(0))
        lengths.append((middle + half).clamp_max(size) - starts[axis])
    return torch.stack((*starts, *lengths), 1)


def within(boxes: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return 1.0 for rows (B, height) and columns (B, width) inside the boxes (B, 4), 0.0 outside."""

    def inside(start: Tensor, length: Tensor, size: int) -> Tensor:
        positions = torch.arange(size, device=boxes.device)
        return ((positions >= start) & (positions < start + length)).float()

    top, left, rows, columns = boxes.split(1, dim=1)
    return inside(top, rows, height), inside(left, columns, width)


def erase(images: Tensor, boxes: Tensor, fill: Tensor) -> Tensor:
    """Paint boxes (B, 4) with the colour `fill` (C,)."""
    rows, columns = within(boxes, *images.shape[2:])
    inside = (rows[:, :, None] * columns[:, None, :])[:, None]
    return images.mul_(1 - inside).add_(inside * fill[:, None, None])


# ---- colours: float32 images (B, C, H, W) in 0 … 255, may be changed in place; parameters (B,)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend images with black (factor 0)."""
    return images.mul_(_each(factors)).clamp_(0, 255)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend images with their mean grey (factor 0)."""
    grey = _grey(images.mean((2, 3), keepdim=True))
    return images.mul_(_each(factors)).add_(grey * _each(1 - factors)).clamp_(0, 255)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend images with their grey version (factor 0). Images of one channel are unchanged."""
    return images if images.shape[1] == 1 else images.lerp_(_grey(images), _each(1 - factors)).clamp_(0, 255)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue in HSV by a share of the colour wheel, -0.5 … 0.5. Images of one channel are unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    highest, lowest = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    chroma = highest - lowest
    # Distance from red on the hexagon of HSV, 0 … 3, positive towards green. With one channel at 0 and one at 1, it is
    # 1 + green + blue - red everywhere.
    distance = (green + blue).sub_(red).sub_(lowest).div_(chroma.clamp_min(1e-6)).add_(1)
    hue = torch.copysign(distance, green - blue).add_(6 * shifts[:, None, None])
    for channel, primary in enumerate((0, 2, -2)):
        # Distance from the channel's primary colour, 0 … 3. The channel is highest up to 1, and lowest from 2 on.
        distance = (hue - primary).abs_().sub_(3).abs_().sub_(3).abs_()
        torch.addcmul(highest, chroma, distance.sub_(1).clamp_(0, 1), value=-1, out=images[:, channel])
    return images


def adjust_sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend images with their smoothed version (factor 0). Border pixels are unchanged."""
    if min(images.shape[2:]) > 2:
        rows = images[:, :, :-2] + images[:, :, 1:-1]
        rows += images[:, :, 2:]
        smooth = rows[..., :-2] + rows[..., 1:-1]
        smooth += rows[..., 2:]
        inner = images[:, :, 1:-1, 1:-1]
        smooth.add_(inner, alpha=4).div_(13)
        inner.lerp_(smooth, _each(1 - factors)).clamp_(0, 255)
    return images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` of 8 bits of each level."""
    steps = _each(2 ** (8 - bits))
    return images.div_(steps).floor_().mul_(steps)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert levels at or above a threshold in 0 … 255."""
    signs = torch.copysign(torch.ones_like(images), images - _each(thresholds))  # 1 at or above the threshold
    return images.sub_(127.5).mul_(signs).neg_().add_(127.5)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    lowest, highest = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = lowest == highest
    return images.sub_(lowest.masked_fill(flat, 0)).mul_(255 / (highest - lowest).masked_fill(flat, 255))


def equalize(images: Tensor) -> Tensor:
    """Equalise the histogram of each channel."""
    from torchvision.transforms.v2 import functional  # slow to import, and not needed by other operations

    return functional.equalize(images.byte()).float()


def gaussian_blur(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """Blur with standard deviations in pixels, cut off at `radius` pixels, which must be less than either side."""
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    weights = torch.softmax(-0.5 * (offsets / sigmas[:, None]).square(), 1)[..., None, None, None]
    images = F.pad(images, (radius,) * 4, mode="reflect")
    for dim in (2, 3):
        size = images.shape[dim] - 2 * radius
        blurred = images.narrow(dim, 0, size) * weights[:, 0]
        for shift in range(1, 2 * radius + 1):
            blurred.addcmul_(images.narrow(dim, shift, size), weights[:, shift])
        images = blurred
    return images


_COLOURS = {
    "brightness": adjust_brightness, "contrast": adjust_contrast, "saturation": adjust_saturation, "hue": adjust_hue
}  # fmt: skip


def _each(parameters: Tensor) -> Tensor:
    return parameters[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    """Return the luminance (B, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


# ---- geometry


def resized_crop(images: Tensor, boxes: Tensor) -> Tensor:
    """Crop boxes and scale them to the images' own size with bilinear interpolation.

    Boxes are only enlarged, so no antialiasing is needed. Rows are blended first, then columns as rows of the
    transposed images. On a CPU this takes half as long as `grid_sample`.

    Args:
        images: uint8 or float32 (B, H, W, C).
        boxes: (B, 4), within the image.

    Returns:
        float32 (B, C, H, W).
    """
    count, height, width, channels = images.shape
    top, left, rows, columns = boxes.unbind(1)
    image = torch.arange(count, device=images.device)[:, None]
    blended = _blend_rows(images.reshape(-1, width * channels), _neighbours(top, rows, height), image * height)
    transposed = blended.view(count, height, width, channels).permute(0, 3, 2, 1).reshape(-1, height)
    planes = torch.arange(count * channels, device=images.device)[:, None]
    columns_of_planes = [values.repeat_interleave(channels, 0) for values in _neighbours(left, columns, width)]
    blended = _blend_rows(transposed, columns_of_planes, planes * width)
    return blended.view(count, channels, width, height).transpose(2, 3)


def _neighbours(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source rows of each of `size` scaled rows, int64 (B, size), and the share of the second one."""
    positions = (torch.arange(size, device=start.device) + 0.5) * (length / size)[:, None] - 0.5
    last = length[:, None] - 1
    positions = positions.clamp_min(0).minimum(last)  # pixels outside the box do not count
    before = positions.floor()
    return (start[:, None] + before).long(), (start[:, None] + (before + 1).minimum(last)).long(), positions - before


def _blend_rows(rows: Tensor, neighbours: Sequence[Tensor], first: Tensor) -> Tensor:
    """Blend pairs of rows from `_neighbours`, (N, n) and relative to `first` (N, 1), to float32 (N·n, columns)."""
    before, after, shares = neighbours
    lower, upper = (rows.index_select(0, (first + numbers).flatten()).float() for numbers in (before, after))
    return lower.lerp_(upper, shares.view(-1, 1))


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Sample each pixel bilinearly from the position that a matrix maps it to; use `fill` (C,) outside the image.

    Args:
        images: float32 (B, C, H, W).
        matrices: (B, 2, 3), or (B, 3, 3) for a perspective, in coordinates x, y, 1. Images span -1 … 1 in both
            directions. A product of matrices applies the last one first.
        fill: float32 (C,).
    """
    height, width = images.shape[2:]
    columns, rows = (((torch.arange(size, device=images.device) + 0.5) * (2 / size) - 1) for size in (width, height))
    # Sums of rows and columns take a tenth of the time of affine_grid's products.
    parts = [(line[:, 0:1] * columns, line[:, 1:2] * rows + line[:, 2:3]) for line in matrices.unbind(1)]
    sums = [(across[:, None, :], down[:, :, None]) for across, down in parts]
    grid = matrices.new_empty(len(images), height, width, 2)
    for axis in (0, 1):
        torch.add(*sums[axis], out=grid[..., axis])
    if len(sums) == 3:
        grid.div_(torch.add(*sums[2])[..., None])
    offset = fill[:, None, None]
    return F.grid_sample(images - offset, grid, align_corners=False).add_(offset)


def crop_matrices(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return matrices (B, 3, 3) for `warp` that scale boxes (B, 4) to the image's size."""
    top, left, rows, columns = boxes.unbind(1)
    return _matrices(
        (columns / width, 0, (2 * left + columns) / width - 1),
        (0, rows / height, (2 * top + rows) / height - 1),
    )


def rotation_matrices(angles: Tensor, height: int, width: int) -> Tensor:
    """Return matrices (B, 3, 3) for `warp` that rotate about the centre, counter-clockwise, in degrees."""
    cos, sin = angles.deg2rad().cos(), angles.deg2rad().sin()
    return _matrices((cos, -sin * (height / width), 0), (sin * (width / height), cos, 0))


def perspective_matrices(corners: Tensor, height: int, width: int) -> Tensor:
    """Return matrices (B, 3, 3) for `warp` that move the corners, clockwise from the top left, to x, y (B, 4, 2)."""
    start, end = (
        torch.stack((places[..., 0] * (2 / width) - 1, places[..., 1] * (2 / height) - 1), 2)
        for places in (image_corners(height, width, corners.device).expand_as(corners), corners)
    )
    points = F.pad(end, (0, 1), value=1.0)
    zeros = torch.zeros_like(points)
    x = torch.cat((points, zeros, -start[..., 0:1] * end), 2)
    y = torch.cat((zeros, points, -start[..., 1:2] * end), 2)
    # Each corner gives two of eight equations (Heckbert, Fundamentals of texture mapping, 1989).
    equations, values = torch.cat((x, y), 1), torch.cat((start[..., 0], start[..., 1]), 1)
    entries = torch.linalg.solve_ex(equations, values).result  # `solve` would synchronise the host to check for errors
    return F.pad(entries, (0, 1), value=1.0).view(-1, 3, 3)


_MOVES = {"crop": crop_matrices, "rotation": rotation_matrices, "perspective": perspective_matrices}


@lru_cache
def image_corners(height: int, width: int, device: torch.device) -> Tensor:
    """Return x and y in pixels of the four corners, clockwise from the top left: float32 (4, 2)."""
    right, bottom = float(width - 1), float(height - 1)
    return torch.tensor([[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]], device=device)


def _matrices(*rows: tuple[Tensor | float, ...]) -> Tensor:
    """Return matrices (B, 3, 3) with the given two rows, then 0, 0, 1."""
    values = [*rows[0], *rows[1], 0, 0, 1]
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.stack(
        [value if isinstance(value, Tensor) else torch.full_like(like, value) for value in values], 1
    ).view(-1, 3, 3)


# ---- operations of policies


@lru_cache
def policy_magnitudes(policy: str, height: int, width: int, device: torch.device) -> Tensor:
    """Return torchvision's magnitudes of `trivial` or `randaugment`, float32 (operations, BINS)."""
    wide = policy == "trivial"
    moves = (32.0, 32.0) if wide else (150 / 331 * width, 150 / 331 * height)
    shear, turn, blend, lost_bits = (0.99, 135.0, 0.99, 6) if wide else (0.3, 30.0, 0.9, 4)
    ends = (0.0, shear, shear, *moves, turn, blend, blend, blend, blend)
    rising = [torch.linspace(0.0, end, BINS) for end in ends]
    bits = (8 - torch.arange(BINS) / ((BINS - 1) / lost_bits)).round()
    zeros = torch.zeros(BINS)
    thresholds = torch.linspace(255.0, 0.0, BINS)  # for solarize; torchvision uses 0 … 1 for floats
    return torch.stack((*rising, bits, thresholds, zeros, zeros)).to(device)


def apply_operations(images: Tensor, operations: Tensor, magnitudes: Tensor, fill: Tensor) -> Tensor:
    """Apply one of `OPERATIONS` to each image. An operation is computed only for the images that drew it.

    This synchronises a GPU once, because the host needs the number of images of each operation.

    Args:
        images: float32 (B, C, H, W) in 0 … 255; may be changed in place.
        operations: int64 (B,), indices into `OPERATIONS`.
        magnitudes: (B,), signed.
        fill: (C,), colour of areas outside the image.
    """
    order = operations.argsort(stable=True)
    counts = (operations[:, None] == torch.arange(len(OPERATIONS), device=operations.device)).sum(0).tolist()
    counts[1:6] = [sum(counts[1:6])]  # all moves at once
    for drawn, function in zip(order.split(counts), _OPERATIONS, strict=True):
        if len(drawn) == len(images):
            return function(images, magnitudes, operations, fill)
        if len(drawn):
            images.index_copy_(0, drawn, function(images[drawn], magnitudes[drawn], operations[drawn], fill))
    return images


def _move(images: Tensor, magnitudes: Tensor, operations: Tensor, fill: Tensor) -> Tensor:
    """Shear, translate or rotate each image in one warp."""
    height, width = images.shape[2:]
    # Each image has one of these five magnitudes. The others are 0.
    shear_x, shear_y, x, y, angles = (magnitudes * (operations == number) for number in range(1, 6))
    shear_x, shear_y = shear_x * (height / width), shear_y * (width / height)
    matrices = rotation_matrices(angles, height, width)[:, :2]
    matrices[:, 0, 1:] += torch.stack((shear_x, shear_x - 2 * x.trunc() / width), 1)
    matrices[:, 1, 0] += shear_y
    matrices[:, 1, 2] += shear_y - 2 * y.trunc() / height
    return warp(images, matrices, fill)


# Functions of (images, magnitudes, operations, fill), in the order of OPERATIONS. The five moves share one function.
_OPERATIONS: tuple[Callable[..., Tensor], ...] = (
    lambda images, *_: images,
    _move,
    lambda images, magnitudes, *_: adjust_brightness(images, 1 + magnitudes),
    lambda images, magnitudes, *_: adjust_saturation(images, 1 + magnitudes),
    lambda images, magnitudes, *_: adjust_contrast(images, 1 + magnitudes),
    lambda images, magnitudes, *_: adjust_sharpness(images, 1 + magnitudes),
    lambda images, magnitudes, *_: posterize(images, magnitudes),
    lambda images, magnitudes, *_: solarize(images, magnitudes),
    lambda images, *_: autocontrast(images),
    lambda images, *_: equalize(images),
)
