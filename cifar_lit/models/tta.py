"""Test-time augmentation (`model.tta`), as in the CIFAR speed records."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VIEWS = ("none", "mirror", "full")


def view_logits(net: nn.Module, images: Tensor, views: str, plain: Tensor) -> Tensor:
    """Return logits averaged over views of each image, as in K. Jordan's airbench (2024).

    Args:
        net: the net, in evaluation mode.
        images: float (B, C, height, width).
        views: `mirror`: plain and mirrored images, each with weight 1/2. `full`: plain and mirrored images, each with
            weight 1/4, and the same shifted by (1, 1) and (-1, -1) pixels with reflected edges, each with weight 1/8.
        plain: logits of the plain images (B, classes).

    Returns:
        (B, classes), at least float32.
    """

    def with_mirror(images: Tensor, logits: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return (logits.type(dtype) + net(images.flip(3)).type(dtype)) / 2

    mean = with_mirror(images, plain)
    if views == "mirror":
        return mean
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    first, second = padded[:, :, :height, :width], padded[:, :, 2:, 2:]
    return mean / 2 + (with_mirror(first, net(first)) + with_mirror(second, net(second))) / 4
