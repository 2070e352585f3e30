"""Test-time views: one answer from several looks at an image, as the CIFAR speed records report it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VIEWS = ("none", "mirror", "full")


def view_logits(net: nn.Module, images: Tensor, views: str) -> Tensor:
    """Logits averaged over views of each image, as in K. Jordan's airbench (2024).

    Args:
        net: in evaluation mode.
        images: float (B, C, height, width).
        views: none: the images as they are. mirror: and left-right mirrored, half each. full: both of these a quarter each,
            and an eighth each the images moved by one pixel down and right, by one up and left, and the mirrors of these two;
            what comes in at the edge is reflected.

    Returns:
        (B, classes), at least float32 where there are several views.
    """

    def with_mirror(images: Tensor) -> Tensor:
        logits = net(images)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return (logits.type(exact) + net(images.flip(3)).type(exact)) / 2

    if views == "none":
        return net(images)
    mean = with_mirror(images)
    if views == "mirror":
        return mean
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    return mean / 2 + (with_mirror(padded[:, :, :height, :width]) + with_mirror(padded[:, :, 2:, 2:])) / 4
