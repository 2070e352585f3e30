"""Augmentations of whole batches on any device, in which every image has parameters of its own.

Each is a function of float32 images (B, C, H, W) in 0 … 255 and of parameters, tensors (B,) where nothing else is said. It may
write into the images that it is given, and means what torchvision's function of the same name means, but that values are not cut
to whole levels after each of several operations.

On a CPU torch takes ten times as long to choose by a mask of bools as to add: what is below mostly does without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

# ---- colours


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """0 is black, 1 the image."""
    return images.mul_(_each(factors)).clamp_(0, 255)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """0 is the mean grey, 1 the image."""
    grey = _grey(images.mean((2, 3), keepdim=True))
    return images.mul_(_each(factors)).add_(grey * _each(1 - factors)).clamp_(0, 255)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """0 is grey, 1 the image; images of one channel stay as they are."""
    return images if images.shape[1] == 1 else images.lerp_(_grey(images), _each(1 - factors)).clamp_(0, 255)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turns the hue by a share of the colour wheel, -0.5 … 0.5, in HSV; images of one channel stay as they are."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    highest, lowest = torch.maximum(torch.maximum(red, green), blue), torch.minimum(torch.minimum(red, green), blue)
    chroma = highest - lowest
    # The distance from red on HSV's hexagon, 0 … 3: with one channel at 0 and one at 1, it is 1 + green + blue - red everywhere.
    # Towards green it counts as positive.
    distance = (green + blue).sub_(red).sub_(lowest).div_(chroma.clamp_min(1e-6)).add_(1)
    hue = torch.copysign(distance, green - blue).add_(6 * shifts[:, None, None])
    for channel, place in enumerate((0, 2, -2)):
        distance = (
            (hue - place).abs_().sub_(3).abs_().sub_(3).abs_()
        )  # from the channel's own place, the short way around
        # at its highest up to a distance of 1, at its lowest from 2 on
        torch.addcmul(highest, chroma, distance.sub_(1).clamp_(0, 1), value=-1, out=images[:, channel])
    return images


def adjust_sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """0 is smoothed, 1 the image; the outermost pixels stay as they are."""
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
    """Keeps so many of the 8 bits of each level."""
    steps = _each(2 ** (8 - bits))
    return images.div_(steps).floor_().mul_(steps)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Inverts the levels from a threshold in 0 … 255 on."""
    signs = torch.copysign(torch.ones_like(images), images - _each(thresholds))  # 1 where they are reached
    return images.sub_(127.5).mul_(signs).neg_().add_(127.5)


def autocontrast(images: Tensor) -> Tensor:
    """Stretches each channel to all levels."""
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = least == most
    return images.sub_(least.masked_fill(flat, 0)).mul_(255 / (most - least).masked_fill(flat, 255))


def equalize(images: Tensor) -> Tensor:
    """Spreads the levels of each channel so that all are about as frequent."""
    from torchvision.transforms.v2 import functional  # takes a second, which other augmentations need not wait for

    return functional.equalize(images.byte()).float()  # each image by its own levels already


def gaussian_blur(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """Blurs with a Gaussian of a standard deviation in pixels, cut at `radius` pixels, which must be less than either side."""
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


def erase(images: Tensor, boxes: Tensor, fill: Tensor) -> Tensor:
    """Paints a box with `fill` (C,). boxes: (B, 4) of top, left, height, width in pixels."""
    rows, columns = within(boxes, *images.shape[2:])
    inside = (rows[:, :, None] * columns[:, None, :])[:, None]
    return images.mul_(1 - inside).add_(inside * fill[:, None, None])


def within(boxes: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """1.0 for the rows, (B, height), and the columns, (B, width), of boxes (B, 4) of top, left, height, width; 0.0 for others."""
    tops_lefts, sizes = boxes[:, :2], boxes[:, 2:]
    places = (torch.arange(length, device=boxes.device) for length in (height, width))
    rows, columns = (
        ((place >= tops_lefts[:, axis, None]) & (place < (tops_lefts + sizes)[:, axis, None])).float()
        for axis, place in enumerate(places)
    )
    return rows, columns


def _each(parameters: Tensor) -> Tensor:
    return parameters[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    """The luminance (B, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


# ---- geometry


def resized_crop(images: Tensor, boxes: Tensor) -> Tensor:
    """The boxes, scaled to the images' own size with bilinear interpolation: float32 (B, C, H, W).

    That enlarges, so there is nothing to antialias. Whole rows are blended, then columns as the rows of turned images: on a CPU
    that takes half of `grid_sample`'s time.

    images: uint8 or float32 (B, H, W, C). boxes: (B, 4) of top, left, height, width in pixels, within the image.
    """
    count, height, width, channels = images.shape
    top, left, rows, columns = boxes.unbind(1)
    image = torch.arange(count, device=images.device)[:, None]
    blended = _blend_rows(images.reshape(-1, width * channels), _neighbours(top, rows, height), image * height)
    turned = blended.view(count, height, width, channels).permute(0, 3, 2, 1).reshape(-1, height)
    planes = torch.arange(count * channels, device=images.device)[:, None]
    columns_of_planes = [each.repeat_interleave(channels, 0) for each in _neighbours(left, columns, width)]
    blended = _blend_rows(turned, columns_of_planes, planes * width)
    return blended.view(count, channels, width, height).transpose(2, 3)


def _neighbours(start: Tensor, length: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Between which two rows of a box (B,) each of its `size` rows lies when it is scaled, int64 (B, size), and how far."""
    places = (torch.arange(size, device=start.device) + 0.5) * (length / size)[:, None] - 0.5
    last = length[:, None] - 1
    places = places.clamp_min(0).minimum(last)  # nothing around the box is mixed in
    before = places.floor()
    return (start[:, None] + before).long(), (start[:, None] + (before + 1).minimum(last)).long(), places - before


def _blend_rows(rows: Tensor, neighbours: Sequence[Tensor], first: Tensor) -> Tensor:
    """Rows between two of `rows` each, float32. neighbours: of `_neighbours`, (N, n), counted from `first` (N, 1)."""
    before, after, shares = neighbours
    lower, upper = (rows.index_select(0, (first + each).flatten()).float() for each in (before, after))
    return lower.lerp_(upper, shares.view(-1, 1))


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Images whose pixels come, bilinearly interpolated, from where a matrix leads each place; `fill` (C,) from outside.

    matrices: (B, 2, 3), or (B, 3, 3) where lines that were parallel need not stay so; of coordinates x, y, 1 in which images span
        -1 … 1 in both directions. The product of several does what they do one after the other, the last one's first.
    """
    height, width = images.shape[2:]
    columns, rows = (((torch.arange(size, device=images.device) + 0.5) * (2 / size) - 1) for size in (width, height))
    # sums of rows and columns take a tenth of the time of affine_grid's products
    parts = [(line[:, 0:1] * columns, line[:, 1:2] * rows + line[:, 2:3]) for line in matrices.unbind(1)]
    x_y = [(across[:, None, :], down[:, :, None]) for across, down in parts]
    grid = matrices.new_empty(len(images), height, width, 2)
    if len(x_y) == 2:
        for axis, (across, down) in enumerate(x_y):
            torch.add(across, down, out=grid[..., axis])
    else:
        depth = x_y[2][0] + x_y[2][1]
        for axis, (across, down) in enumerate(x_y[:2]):
            torch.div(across + down, depth, out=grid[..., axis])
    offset = fill[:, None, None]
    return F.grid_sample(images - offset, grid, align_corners=False).add_(offset)


def crop_matrices(boxes: Tensor, height: int, width: int) -> Tensor:
    """(B, 3, 3) that `warp` scales boxes (B, 4) of top, left, height, width with, showing what lies around where it is turned."""
    top, left, rows, columns = boxes.unbind(1)
    return _matrices(
        (columns / width, 0, (2 * left + columns) / width - 1),
        (0, rows / height, (2 * top + rows) / height - 1),
    )


def rotation_matrices(angles: Tensor, height: int, width: int) -> Tensor:
    """(B, 3, 3) that `warp` turns images with around their middle, counter-clockwise by an angle in degrees."""
    cos, sin = angles.deg2rad().cos(), angles.deg2rad().sin()
    return _matrices((cos, -sin * (height / width), 0), (sin * (width / height), cos, 0))


def shear_matrices(x: Tensor, y: Tensor, height: int, width: int) -> Tensor:
    """(B, 3, 3) that `warp` shears with, keeping the top left corner: pixels that each row, or column, is moved by."""
    x, y = x * (height / width), y * (width / height)
    return _matrices((1, x, x), (y, 1, y))


def translation_matrices(x: Tensor, y: Tensor, height: int, width: int) -> Tensor:
    """(B, 3, 3) that `warp` moves images with, by pixels to the right and down."""
    return _matrices((1, 0, -2 * x / width), (0, 1, -2 * y / height))


def perspective_matrices(corners: Tensor, height: int, width: int) -> Tensor:
    """(B, 3, 3) that `warp` moves the four corners with, from the top left one clockwise, to x, y in pixels (B, 4, 2)."""
    start, end = (
        torch.stack((places[..., 0] * (2 / width) - 1, places[..., 1] * (2 / height) - 1), 2)
        for places in (image_corners(height, width, corners.device).expand_as(corners), corners)
    )
    points = F.pad(end, (0, 1), value=1.0)
    none = torch.zeros_like(points)
    x = torch.cat((points, none, -start[..., 0:1] * end), 2)
    y = torch.cat((none, points, -start[..., 1:2] * end), 2)
    # each corner gives two equations for the eight numbers (Heckbert, Fundamentals of texture mapping, 1989)
    equations, places = torch.cat((x, y), 1), torch.cat((start[..., 0], start[..., 1]), 1)
    numbers = torch.linalg.solve_ex(equations, places).result  # `solve` has a GPU's host wait to see whether it could
    return F.pad(numbers, (0, 1), value=1.0).view(-1, 3, 3)


@lru_cache
def image_corners(height: int, width: int, device: torch.device) -> Tensor:
    """x, y in pixels of the four corners from the top left one clockwise, float32 (4, 2)."""
    right, bottom = float(width - 1), float(height - 1)
    return torch.tensor([[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]], device=device)


def _matrices(first: tuple[Tensor | float, ...], second: tuple[Tensor | float, ...]) -> Tensor:
    """(B, 3, 3) of two rows, and 0, 0, 1."""
    like = next(value for value in (*first, *second) if isinstance(value, Tensor))
    values = [
        value if isinstance(value, Tensor) else torch.full_like(like, value) for value in (*first, *second, 0, 0, 1)
    ]
    return torch.stack(values, 1).view(-1, 3, 3)


# ---- operations of policies

# As torchvision's TrivialAugmentWide and RandAugment have them, in their order.
OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness",
    "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
SIGNED = 9  # from the first to this one, a magnitude may be negated
BINS = 31  # magnitudes of each


@lru_cache
def policy_magnitudes(policy: str, height: int, width: int, device: torch.device) -> Tensor:
    """float32 (operations, BINS): torchvision's magnitudes of `trivial` (wide) or `randaugment`, of solarize in 0 … 255."""
    wide = policy == "trivial"
    moves = (32.0, 32.0) if wide else (150 / 331 * width, 150 / 331 * height)
    shear, turn, blend, lost_bits = (0.99, 135.0, 0.99, 6) if wide else (0.3, 30.0, 0.9, 4)
    ends = (0.0, shear, shear, *moves, turn, blend, blend, blend, blend)
    rising = [torch.linspace(0.0, end, BINS) for end in ends]
    bits = (8 - torch.arange(BINS) / ((BINS - 1) / lost_bits)).round()
    return torch.stack((*rising, bits, torch.linspace(255.0, 0.0, BINS), torch.zeros(BINS), torch.zeros(BINS))).to(
        device
    )


def apply_operations(images: Tensor, operations: Tensor, magnitudes: Tensor, fill: Tensor) -> Tensor:
    """Does to each image one of `OPERATIONS`, each computed on the images that drew it only.

    operations: int64 (B,), places in `OPERATIONS`. magnitudes: signed. fill: (C,), of places from outside the image, which like
        all is interpolated bilinearly. The host has to know how many images drew what: where the device is no CPU, it waits
        for that once, and can meanwhile give the device nothing new to do.
    """
    order = operations.argsort(stable=True)
    counts = (operations[:, None] == torch.arange(len(OPERATIONS), device=operations.device)).sum(0).tolist()
    _, _, height, width = images.shape

    def geometry(images: Tensor, magnitudes: Tensor, operations: Tensor) -> Tensor:
        shear_x, shear_y, x, y, angles = (magnitudes * (operations == number) for number in range(1, 6))
        # of each image, two of them are the identity
        matrices = (
            shear_matrices(shear_x, shear_y, height, width)
            @ translation_matrices(x.trunc(), y.trunc(), height, width)
            @ rotation_matrices(angles, height, width)
        )
        return warp(images, matrices[:, :2], fill)

    functions: list[tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
        (counts[0], lambda images, *_: images),
        (sum(counts[1:6]), geometry),
        (counts[6], lambda images, magnitudes, _: adjust_brightness(images, 1 + magnitudes)),
        (counts[7], lambda images, magnitudes, _: adjust_saturation(images, 1 + magnitudes)),
        (counts[8], lambda images, magnitudes, _: adjust_contrast(images, 1 + magnitudes)),
        (counts[9], lambda images, magnitudes, _: adjust_sharpness(images, 1 + magnitudes)),
        (counts[10], lambda images, magnitudes, _: posterize(images, magnitudes)),
        (counts[11], lambda images, magnitudes, _: solarize(images, magnitudes)),
        (counts[12], lambda images, *_: autocontrast(images)),
        (counts[13], lambda images, *_: equalize(images)),
    ]
    for chosen, (count, function) in zip(order.split([count for count, _ in functions]), functions, strict=True):
        if count == len(images):  # nothing to sort
            return function(images, magnitudes, operations)
        if count:
            images.index_copy_(0, chosen, function(images[chosen], magnitudes[chosen], operations[chosen]))
    return images
