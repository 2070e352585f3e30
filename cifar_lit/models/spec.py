"""`NetSpec`: how to build a net, and the images and options that it accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

TIMM = "timm/"  # prefix of the names of timm's nets


class NetSpec(NamedTuple):
    """How to build a net, and the images and options that it accepts.

    Args:
        build: called with the keywords channels, image_size (height, width), num_classes, width (see `build_net`) and
            the net's own options. Returns a module that maps float images (B, channels, height, width) to logits (B,
            num_classes).
        min_size: smallest height and width of images in pixels, or a function of the options that returns it.
        any_size: whether a net built for one image size accepts other sizes too, or a function that returns it.
        options: names of the net's own options; None if it accepts any.
    """

    build: Callable[..., nn.Module]
    min_size: int | Callable[..., int] = 1
    any_size: bool | Callable[[], bool] = False
    options: tuple[str, ...] | None = ()
