"""Weight gradients of convolutions on small feature maps, up to several times as fast on CPUs with AMX.

For small images, the time that oneDNN takes for the gradient of the weights in bfloat16 depends on the number of images
rather than on their size. `StripConvolution` therefore joins several images to a wide one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from cifar_lit.hardware import has_amx

LENGTH = 10  # images in a strip; from 5 to 50, the time hardly differs
MAX_WIDTH = 10  # pixels; on wider images, joining them takes as long as it saves


class StripConvolution(torch.autograd.Function):
    """A 3×3 convolution with a padding of 1 pixel, whose weight gradient is computed from strips of images."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution of maps (B, C, H, W) with a weight (D, C, 3, 3)."""
        ctx.save_for_backward(maps, weight)
        return F.conv2d(maps, weight, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of the maps, if required, and of the weight."""
        maps, weight = ctx.saved_tensors
        of_maps = None
        if ctx.needs_input_grad[0]:
            of_maps = conv2d_input(maps.shape, weight, gradient, padding=1)
        return of_maps, conv2d_weight(in_strips(maps), weight.shape, in_strips(gradient), padding=1)


def in_strips(maps: Tensor) -> Tensor:
    """Join images side by side, each followed by a column of zeros, so that no 3×3 window sees two images.

    Args:
        maps: (B, C, H, W). If `LENGTH` does not divide B, images of zeros are added.

    Returns:
        (strips, C, H, LENGTH · (W + 1)), in the channels-last format.
    """
    missing = -len(maps) % LENGTH
    padded = F.pad(maps, (0, 1, 0, 0, 0, 0, 0, missing)).permute(0, 2, 3, 1)
    rows = padded.unflatten(0, (-1, LENGTH)).transpose(1, 2)  # (strips, H, LENGTH, W + 1, C)
    return rows.flatten(2, 3).permute(0, 3, 1, 2)


def convolve(conv: nn.Module, maps: Tensor) -> Tensor:
    """Return `conv(maps)`, computed so that the gradient of its weight is fast.

    Args:
        conv: a convolution without bias, with a stride of 1 and a padding that keeps the size.
        maps: (B, C, H, W).
    """
    weight = cast("Tensor", conv.weight)
    is_suited = weight.shape[-1] == 3 and maps.shape[-1] <= MAX_WIDTH and maps.dtype == torch.bfloat16
    if not is_suited or maps.device.type != "cpu" or not has_amx():
        return cast("Tensor", conv(maps))
    return StripConvolution.apply(maps, weight.type(maps.dtype))
