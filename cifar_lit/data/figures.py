"""Signed distances of the figures that `shapes` draws.

Each function takes coordinates x, y (float arrays of one shape) in the figure's own frame, where the figure fills about the
unit disc, and returns the distance to its edge: negative inside, with slope 1 across the edge, which is what antialiasing needs.
Every figure is its own mirror image, so that a flip never changes a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.floating]  # float32 throughout, which numpy's types do not follow through arithmetic


def _length(x: Field, y: Field) -> Field:
    return np.sqrt(x * x + y * y)  # several times faster than np.hypot, which guards against overflow


def _circle(x: Field, y: Field) -> Field:
    return _length(x, y) - 0.88


def _square(x: Field, y: Field) -> Field:
    return np.maximum(np.abs(x), np.abs(y)) - 0.76


def _triangle(x: Field, y: Field) -> Field:
    return np.maximum(-x, 0.5 * x + 0.8660254 * np.abs(y)) - 0.54


def _star(x: Field, y: Field) -> Field:
    tip, notch, sector = 1.08, 0.44, 2 * math.pi / 5
    angle = np.arctan2(y, x)
    angle = np.abs(angle - sector * np.round(angle / sector))  # folded onto the half sector beside one tip
    radius = _length(x, y)
    notch_x, notch_y = notch * math.cos(sector / 2), notch * math.sin(sector / 2)
    edge = math.hypot(tip - notch_x, notch_y)
    return ((radius * np.cos(angle) - tip) * notch_y + radius * np.sin(angle) * (tip - notch_x)) / edge


def _cross(x: Field, y: Field) -> Field:
    across, along = np.abs(x), np.abs(y)
    return np.maximum(np.maximum(across, along) - 0.95, np.minimum(across, along) - 0.29)


def _ring(x: Field, y: Field) -> Field:
    return np.abs(_length(x, y) - 0.72) - 0.2


def _crescent(x: Field, y: Field) -> Field:
    return np.maximum(_length(x, y) - 0.98, 0.78 - _length(x - 0.5, y))


def _heart(x: Field, y: Field) -> Field:
    half, reach = 0.47, 0.65  # two bars of half width `half`, at right angles from a common corner, each ending in a half disc
    x, y = x + 0.1, y + 0.1
    bars = (np.maximum(np.abs(a - (reach - half) / 2) - (reach - half) / 2, np.abs(b)) for a, b in ((x, y), (y, x)))
    discs = (_length(x - reach, y), _length(x, y - reach))
    return np.minimum(np.minimum(*bars), np.minimum(*discs)) - half


def _arrow(x: Field, y: Field) -> Field:
    across = np.abs(y)
    shaft = np.maximum(np.abs(x + 0.4) - 0.6, across - 0.19)
    head = np.maximum(-x, ((x - 1) * 0.74 + across) / math.hypot(1, 0.74))
    return np.minimum(shaft, head)


def _bar(x: Field, y: Field) -> Field:
    return np.maximum(np.abs(x) - 1, np.abs(y) - 0.28)


FIGURES: dict[str, Callable[[Field, Field], Field]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
    "crescent": _crescent,
    "heart": _heart,
    "arrow": _arrow,
    "bar": _bar,
}
