"""Float operations of the augmentation, with parameters (B,) or (B, …): float32 versions of torchvision's functions.

torchvision rounds to whole levels after each operation; these do not. Most avoid boolean masks, which take ten times as
long as additions on CPUs. Images are float32 (B, C, H, W) in 0 … 255 and may be changed in place. Boxes are (B, 4) of
top, left, height and width in pixels. `fill` (C,) is the colour of erased boxes and of areas outside the image.
Constants stay Python numbers, because copying a tensor to a GPU would synchronise the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.moves import within

BINS = 31  # magnitudes of an operation of a policy
SIGNED = 9  # operations 1 … 9 of a policy may have a negative magnitude
TRIES = 10  # random boxes to try until one fits, as in torchvision


def transform(images: Tensor, drawn: Mapping[str, Tensor], fill: Tensor, largest_blur: float) -> Tensor:
    """Apply the operations with parameters in `drawn` to uint8 images (B, H, W, C); return float32 (B, H, W, C)."""
    height, width = images.shape[1:3]
    if drawn.keys() & _WARPS.keys() == {"crop"}:
        images = resized_crop(images, drawn["crop"])
    else:
        images = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        if warps := [build(drawn[name], height, width) for name, build in _WARPS.items() if name in drawn]:
            matrices = reduce(torch.matmul, warps)
            images = warp(images, matrices if "perspective" in drawn else matrices[:, :2], fill)
    if "operations" in drawn:
        for operations, magnitudes in zip(drawn["operations"].T, drawn["magnitudes"].T, strict=True):
            images = apply_operations(images, operations, magnitudes, fill)
    for name, adjust in _COLOURS.items():
        if name in drawn:
            images = adjust(images, drawn[name])
    if "blur" in drawn:
        images = gaussian_blur(images, drawn["blur"], radius=math.ceil(3 * largest_blur))
    if "erasing" in drawn:
        images = erase(images, drawn["erasing"], fill)
    return images.permute(0, 2, 3, 1).contiguous()


def random_boxes(
    draws: Tensor, area: Sequence[float], ratio: Sequence[float], height: int, width: int, margin: int
) -> tuple[list[Tensor], Tensor]:
    """Return the first of `TRIES` random boxes that fits, and whether any fits, bool (B,), as in torchvision.

    draws: uniform, (B, 2 * TRIES + 2) or more. margin: pixels by which a box must be smaller than the image.
    """
    areas = height * width * (area[0] + (area[1] - area[0]) * draws[:, :TRIES])
    ratios = (math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[:, TRIES : 2 * TRIES]).exp()
    rows, columns = (areas / ratios).sqrt().round(), (areas * ratios).sqrt().round()
    fits = (rows > 0) & (rows <= height - margin) & (columns > 0) & (columns <= width - margin)
    first = fits.int().argmax(1, keepdim=True)
    sizes = [lengths.gather(1, first)[:, 0] for lengths in (rows, columns)]
    top = (draws[:, 2 * TRIES] * (height - sizes[0] + 1)).floor()
    left = (draws[:, 2 * TRIES + 1] * (width - sizes[1] + 1)).floor()
    return [top, left, *sizes], fits.any(1)


def crop_boxes(draws: Tensor, area: Sequence[float], ratio: Sequence[float], height: int, width: int) -> Tensor:
    """Return boxes (B, 4) of random crops. If none fits, use the largest central box with an allowed ratio."""
    boxes, fits = random_boxes(draws, area, ratio, height, width, margin=0)
    shape = min(max(width / height, ratio[0]), ratio[1])
    rows, columns = min(height, round(width / shape)), min(width, round(height * shape))
    central = ((height - rows) // 2, (width - columns) // 2, rows, columns)
    return torch.stack([torch.where(fits, *pair) for pair in zip(boxes, map(float, central), strict=True)], 1)


def cutmix_boxes(shares: Tensor, centres: Tensor, height: int, width: int) -> Tensor:
    """Return boxes (B, 4) with `shares` (B,) of the area, clipped at the borders. centres: uniform draws (B, 2)."""
    starts, lengths = [], []
    for axis, size in enumerate((height, width)):
        middle, half = (centres[:, axis] * size).floor(), (0.5 * shares.sqrt() * size).floor()
        starts.append((middle - half).clamp_min(0))
        lengths.append((middle + half).clamp_max(size) - starts[axis])
    return torch.stack((*starts, *lengths), 1)


def erase(images: Tensor, boxes: Tensor, fill: Tensor) -> Tensor:
    """Paint boxes (B, 4) with the colour `fill` (C,)."""
    rows, columns = within(boxes, *images.shape[2:])
    inside = (rows.float()[:, :, None] * columns.float()[:, None, :])[:, None]
    return images.mul_(1 - inside).add_(inside * fill[:, None, None])


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
    """Blur with standard deviations above 0 in pixels, cut off at `radius` pixels, which must be below either side."""
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


def _each(parameters: Tensor) -> Tensor:
    return parameters[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    """Return the luminance (B, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def resized_crop(images: Tensor, boxes: Tensor) -> Tensor:
    """Crop boxes from uint8 or float32 (B, H, W, C), and scale them bilinearly to the images' own size.

    Boxes are only enlarged, so no antialiasing is needed. Rows are blended first, then columns as rows of the
    transposed images. On a CPU this takes half as long as `grid_sample`.
    """
    count, height, width, channels = images.shape
    top, left, rows, columns = boxes.unbind(1)
    blended = _scaled_rows(images.reshape(-1, width * channels), top, rows, height)
    transposed = blended.view(count, height, width, channels).permute(0, 3, 2, 1).reshape(-1, height)
    blended = _scaled_rows(transposed, left.repeat_interleave(channels), columns.repeat_interleave(channels), width)
    return blended.view(count, channels, width, height).transpose(2, 3)


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


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Sample each pixel bilinearly from the position that a matrix maps it to; use `fill` outside the image.

    Matrices are (B, 2, 3), or (B, 3, 3) for a perspective, in coordinates x, y, 1. Images span -1 … 1 in both
    directions. A product of matrices applies the last one first.
    """
    height, width = images.shape[2:]
    columns, rows = (((torch.arange(size, device=images.device) + 0.5) * (2 / size) - 1) for size in (width, height))
    # Sums of rows and columns take a tenth of the time of affine_grid's products.
    x, y, ones = matrices[..., None].unbind(2)  # (B, lines, 1)
    sums = list(zip((x * columns)[:, :, None].unbind(1), (y * rows + ones)[..., None].unbind(1), strict=True))
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
    x, y = (2 * left + columns) / width - 1, (2 * top + rows) / height - 1  # centres
    return _matrices(columns / width, 0, x, 0, rows / height, y)


def rotation_matrices(angles: Tensor, height: int, width: int) -> Tensor:
    """Return matrices (B, 3, 3) for `warp` that rotate about the centre, counter-clockwise, in degrees."""
    cos, sin = angles.deg2rad().cos(), angles.deg2rad().sin()
    return _matrices(cos, -sin * (height / width), 0, sin * (width / height), cos, 0)


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


_COLOURS = {
    "brightness": adjust_brightness, "contrast": adjust_contrast, "saturation": adjust_saturation, "hue": adjust_hue
}  # fmt: skip
_WARPS = {"crop": crop_matrices, "rotation": rotation_matrices, "perspective": perspective_matrices}


@lru_cache
def image_corners(height: int, width: int, device: torch.device) -> Tensor:
    """Return x and y in pixels of the four corners, clockwise from the top left: float32 (4, 2)."""
    right, bottom = float(width - 1), float(height - 1)
    return torch.tensor([[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]], device=device)


def _matrices(first: Tensor, *further: Tensor | float) -> Tensor:
    """Return matrices (B, 3, 3) of six values in rows, each a number or (B,), then 0, 0, 1."""
    numbers = [value if isinstance(value, Tensor) else torch.full_like(first, value) for value in (*further, 0, 0, 1)]
    return torch.stack((first, *numbers), 1).view(-1, 3, 3)


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
    """Apply to each image one of `OPERATIONS`, given by int64 indices (B,). Magnitudes (B,) are signed.

    An operation is computed for the images that drew it. This synchronises a GPU, because the host needs their number.
    """
    order = operations.argsort(stable=True)
    counts = (operations[:, None] == torch.arange(len(OPERATIONS), device=operations.device)).sum(0).tolist()
    counts[1:6] = [sum(counts[1:6])]  # all moves at once
    for drawn, function in zip(order.split(counts), dict.fromkeys(OPERATIONS.values()), strict=True):
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


# Functions of (images, magnitudes, operations, fill), in the order of torchvision's TrivialAugmentWide and RandAugment.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "Identity": lambda images, *_: images,
    **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), _move),
    "Brightness": lambda images, magnitudes, *_: adjust_brightness(images, 1 + magnitudes),
    "Color": lambda images, magnitudes, *_: adjust_saturation(images, 1 + magnitudes),
    "Contrast": lambda images, magnitudes, *_: adjust_contrast(images, 1 + magnitudes),
    "Sharpness": lambda images, magnitudes, *_: adjust_sharpness(images, 1 + magnitudes),
    "Posterize": lambda images, magnitudes, *_: posterize(images, magnitudes),
    "Solarize": lambda images, magnitudes, *_: solarize(images, magnitudes),
    "AutoContrast": lambda images, *_: autocontrast(images),
    "Equalize": lambda images, *_: equalize(images),
}
