"""`shapes`: a generated data set, so that a first run needs no download.

Each image shows a figure with random position, size, angle and colours, on a graded background with thin lines, dots
and noise. Either the figure or the background is brighter, so a linear model cannot tell the classes apart.

A figure is a signed distance function of coordinates x, y (float arrays of one shape), negative inside. It fills about
the unit disc. Every figure is symmetric, so a flip never changes a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from cifar_lit.base.text import progress
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings, ImageSize, parse_image_size
from cifar_lit.data.sources import Source

Array = NDArray[np.floating]  # always float32, but numpy's types do not infer that


def _length(x: Array, y: Array) -> Array:
    return np.sqrt(x * x + y * y)  # several times faster than np.hypot


def _star(x: Array, y: Array) -> Array:
    tip, notch, sector = 1.08, 0.44, 2 * math.pi / 5
    angle = np.arctan2(y, x)
    angle = np.abs(angle - sector * np.round(angle / sector))  # folded onto half a sector beside one tip
    radius = _length(x, y)
    notch_x, notch_y = notch * math.cos(sector / 2), notch * math.sin(sector / 2)
    edge = math.hypot(tip - notch_x, notch_y)
    return ((radius * np.cos(angle) - tip) * notch_y + radius * np.sin(angle) * (tip - notch_x)) / edge


def _cross(x: Array, y: Array) -> Array:
    across, along = np.abs(x), np.abs(y)
    return np.maximum(np.maximum(across, along) - 0.95, np.minimum(across, along) - 0.29)


def _heart(x: Array, y: Array) -> Array:
    # Two bars at right angles from a common corner, each with a half disc at its end.
    half, reach = 0.47, 0.65  # half width of a bar, centre of its disc
    x, y = x + 0.1, y + 0.1
    bars = (np.maximum(np.abs(a - (reach - half) / 2) - (reach - half) / 2, np.abs(b)) for a, b in ((x, y), (y, x)))
    discs = (_length(x - reach, y), _length(x, y - reach))
    return np.minimum(np.minimum(*bars), np.minimum(*discs)) - half


def _arrow(x: Array, y: Array) -> Array:
    across = np.abs(y)
    shaft = np.maximum(np.abs(x + 0.4) - 0.6, across - 0.19)
    head = np.maximum(-x, ((x - 1) * 0.74 + across) / math.hypot(1, 0.74))
    return np.minimum(shaft, head)


FIGURES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda x, y: _length(x, y) - 0.88,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.76,
    "triangle": lambda x, y: np.maximum(-x, 0.5 * x + 0.8660254 * np.abs(y)) - 0.54,
    "star": _star,
    "cross": _cross,
    "ring": lambda x, y: np.abs(_length(x, y) - 0.72) - 0.2,
    "crescent": lambda x, y: np.maximum(_length(x, y) - 0.98, 0.78 - _length(x - 0.5, y)),
    "heart": _heart,
    "arrow": _arrow,
    "bar": lambda x, y: np.maximum(np.abs(x) - 1, np.abs(y) - 0.28),
}
CLASSES = (*FIGURES, *(f"{large}+{small}" for large in FIGURES for small in FIGURES))
BLOCK_IMAGES = 128  # drawn at a time, so that a channel of 32×32 stays in the CPU cache
LINES, DOTS = 3, 4  # in the background
QUARTERS = 4  # an image with several figures has as many


def shapes(
    train: bool,
    *,
    image_size: ImageSize = 32,
    channels: int = 3,
    num_classes: int = 10,
    count: int,
    seed: int = 0,
    figures: int = 1,
) -> ImageSet:
    """Draw `count` images with equally many of each class. Figures scale with the shorter side.

    Image i depends on `seed`, `train`, i and the other settings, not on `count`. Train and test images never share
    random numbers. The first ten classes are single figures, the other hundred are pairs ("star+ring"). With several
    `figures`, up to 4, an image has four quarters, 1 to that many of them with a figure, and the classes as labels.
    """
    height, width = size = parse_image_size(image_size)
    images = np.empty((count, height, width, channels), np.uint8)
    kinds = np.empty((count, 1 if figures == 1 else QUARTERS), np.int64)  # -1 for a quarter without a figure
    rows = -(-BLOCK_IMAGES // num_classes)  # whole rounds of the classes, so that each block is balanced
    with progress(f"drawing shapes ({'train' if train else 'test'})", count, min_seconds=5.0) as advance:
        for block, start in enumerate(range(0, count, rows * num_classes)):
            rng = np.random.default_rng([seed, int(train), block])
            block_labels = rng.permuted(np.tile(np.arange(num_classes), (rows, 1)), axis=1).ravel()
            block_kinds = block_labels[:, None]
            if figures == 1:
                drawn = _draw(rng, block_labels, size, channels)
            else:
                block_kinds = _quarters(rng, block_labels, num_classes, figures)
                half = -(-height // 2), -(-width // 2)
                drawn = _draw(rng, block_kinds.ravel(), half, channels).reshape(-1, 2, 2, *half, channels)
                drawn = drawn.swapaxes(2, 3).reshape(-1, 2 * half[0], 2 * half[1], channels)[:, :height, :width]
            images[start : start + len(drawn)] = drawn[: count - start]
            kinds[start : start + len(drawn)] = block_kinds[: count - start]
            advance(min(len(drawn), count - start))
    labels = torch.from_numpy(kinds[:, 0])
    if figures > 1:
        labels = torch.from_numpy((kinds[:, :, None] == np.arange(num_classes)).any(1)).float()
    return ImageSet(torch.from_numpy(images), labels, CLASSES[:num_classes])


def _quarters(rng: Generator, labels: NDArray[np.int64], num_classes: int, figures: int) -> NDArray[np.int64]:
    """Return the classes in the quarters of images, (N, 4): `labels` (N,) and up to `figures` - 1 more; -1 for none."""
    kinds = rng.integers(0, num_classes, (len(labels), QUARTERS))
    kinds[:, 0] = labels
    kinds[np.arange(QUARTERS) >= rng.integers(1, figures + 1, (len(labels), 1))] = -1
    return rng.permuted(kinds, axis=1)


def load_shapes(settings: DataSettings, train: bool) -> ImageSet:
    """Return the shapes of these settings. There are a fifth as many test images as training images."""
    images = settings.images
    count = images.count
    if not train:
        count //= 5
    return shapes(
        train,
        image_size=images.size or 32,
        channels=images.channels or 3,
        num_classes=images.num_classes or 10,
        count=count,
        seed=settings.split.seed,
        figures=images.figures,
    )


SHAPES = Source(load_shapes)


def _draw(rng: Generator, labels: NDArray[np.int64], size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """Return images (N, *size, channels) of classes `labels` (N,). Coordinates are in units of the shorter side."""
    count, unit = len(labels), min(size)
    rows, columns = (((np.arange(side, dtype=np.float32) + 0.5) / unit).astype(np.float32) for side in size)
    x, y = np.broadcast_to(columns, (count, *size)), np.broadcast_to(rows[:, None], (count, *size))
    wide, high = _extents(x)
    ground = rng.random((channels, count, 1, 1), np.float32)
    # Brightness wraps around at 1. A step of 0.3 to 0.7 is clearly visible in every channel, brighter or darker.
    figure = (ground + _uniform(rng, 0.3, 0.7, (channels, count, 1, 1))) % 1
    slope_x, slope_y = (_uniform(rng, -0.12, 0.12, (channels, count, 1, 1)) for _ in "xy")
    canvas = ground + (slope_x * (2 * x / wide - 1) + slope_y * (2 * y / high - 1))
    for coverage in _clutter(rng, x, y):
        _paint(canvas, coverage, rng.random((channels, count, 1, 1), np.float32))
    for coverage in _figures(rng, labels, x, y):
        _paint(canvas, coverage, figure)
    canvas += _uniform(rng, 0.01, 0.08, (count, 1, 1)) * rng.standard_normal(canvas.shape, np.float32)
    np.clip(canvas * 255 + 0.5, 0, 255, out=canvas)
    return np.moveaxis(canvas.astype(np.uint8), 0, 3)


def _extents(x: Array) -> tuple[float, float]:
    """Return width and height of images (N, H, W) in units of the shorter side."""
    height, width = x.shape[1:]
    return width / min(height, width), height / min(height, width)


def _uniform(rng: Generator, low: float, high: float, shape: tuple[int, ...]) -> Array:
    return low + (high - low) * rng.random(shape, np.float32)


def _paint(canvas: Array, coverage: Array, colour: Array) -> None:
    """Blend `colour` (C, N, 1, 1) into `canvas` (C, N, H, W) by `coverage` (N, H, W), in place."""
    for plane, shade in zip(canvas, colour, strict=True):
        plane += coverage * (shade - plane)


def _coverage(distance: Array, size: int) -> Array:
    """Return the share of each pixel inside the figure, antialiased over one pixel. `distance` 1 is `size` pixels."""
    return np.clip(0.5 - distance * size, 0, 1)


def _clutter(rng: Generator, x: Array, y: Array) -> Iterator[Array]:
    """Yield coverages (N, H, W) of a random number of thin lines and small dots."""
    shape, size, (wide, high) = (len(x), 1, 1), min(x.shape[1:]), _extents(x)
    number = rng.integers(0, LINES + 1, shape)
    for line in range(LINES):
        angle = _uniform(rng, 0, np.pi, shape)
        left, top = wide * rng.random(shape, np.float32), high * rng.random(shape, np.float32)
        across = np.cos(angle) * (x - left) + np.sin(angle) * (y - top)
        yield (line < number) * _coverage(np.abs(across) - _uniform(rng, 0.01, 0.022, shape), size)
    number = rng.integers(0, DOTS + 1, shape)
    for dot in range(DOTS):
        left, top = wide * rng.random(shape, np.float32), high * rng.random(shape, np.float32)
        distance = np.sqrt((x - left) ** 2 + (y - top) ** 2)
        yield (dot < number) * _coverage(distance - _uniform(rng, 0.02, 0.05, shape), size)


def _figures(rng: Generator, labels: NDArray[np.int64], x: Array, y: Array) -> Iterator[Array]:
    """Yield coverages (N, H, W) of each image's figure, then of the smaller figure beside it if the class is a pair."""
    is_pair = labels >= len(FIGURES)
    shape = (len(labels), 1, 1)
    paired = is_pair.reshape(shape)
    radius = np.where(paired, _uniform(rng, 0.24, 0.28, shape), _uniform(rng, 0.24, 0.4, shape))
    small = np.where(paired, 0.6 * radius, 0)
    gap = np.where(paired, np.float32(0.01), 0)
    # Place the middle of the figure or pair so that no edge leaves the image.
    reach = radius + small + gap
    middle_x, middle_y = (reach + (extent - 2 * reach) * rng.random(shape, np.float32) for extent in _extents(x))
    direction = _uniform(rng, 0, 2 * np.pi, shape)
    kinds = (np.where(is_pair, labels // len(FIGURES) - 1, labels), np.where(is_pair, labels % len(FIGURES), -1))
    for kind, size, offset in ((kinds[0], radius, -small - gap), (kinds[1], small, radius + gap)):
        centre_x, centre_y = middle_x + offset * np.cos(direction), middle_y + offset * np.sin(direction)
        angle = _uniform(rng, 0, 2 * np.pi, shape)
        yield _figure_coverage(kind, x - centre_x, y - centre_y, size, angle)


def _figure_coverage(kind: NDArray[np.int64], x: Array, y: Array, radius: Array, angle: Array) -> Array:
    """Return the coverage (N, H, W) of figures `kind` (N,), -1 for none; x, y (N, H, W) are relative to the centre."""
    coverage = np.zeros_like(x)
    for number, distance in enumerate(FIGURES.values()):
        rows = np.flatnonzero(kind == number)
        if len(rows):
            cos, sin = np.cos(angle[rows]) / radius[rows], np.sin(angle[rows]) / radius[rows]
            to_edge = distance(cos * x[rows] + sin * y[rows], cos * y[rows] - sin * x[rows]) * radius[rows]
            coverage[rows] = _coverage(to_edge, min(x.shape[1:]))
    return coverage
