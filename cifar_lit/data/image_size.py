"""Image sizes in settings: one number for squares, or height and width."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cifar_lit.errors import UsageError

MAX_SIDE = 2048  # pixels; the nets are designed for small images

ImageSize = int | Sequence[int] | str  # 96 for squares, [96, 128] or "96x128" for height and width


def parse_image_size(value: ImageSize) -> tuple[int, int]:
    """Return height and width in pixels. Raise UsageError for an invalid size or a side above `MAX_SIDE`."""
    sides: Sequence[int | str] = (value,) if isinstance(value, int) else value
    if isinstance(value, str):
        sides = re.split("[x×]", value)
    try:
        height, width = map(int, sides if len(sides) > 1 else (*sides, *sides))
    except ValueError:
        form = "a number of pixels for squares, or height x width, such as 96x128"
        shown = str(list(value) if isinstance(value, tuple) else value)[:40]
        raise UsageError(f"--data.image_size must be {form}, not {shown!r}") from None
    if not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE:
        raise UsageError(f"--data.image_size must be from 1 to {MAX_SIDE:,} pixels a side, not {height}×{width}")
    return height, width
