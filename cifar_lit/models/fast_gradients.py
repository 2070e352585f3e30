"""Gradients of convolutions in bfloat16 on CPUs, where oneDNN computes some of them many times as slowly as others.

- The gradient of the weights of a 3×3 convolution on small maps takes a time that depends on the number of images
  rather than on their size (measured on CPUs with AMX). Several images are therefore joined to a wide one.
- Gradients of depthwise convolutions take up to 70 times as long as in float32. They are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.overrides import TorchFunctionMode

LENGTH = 10  # images in a strip; from 5 to 50, the time hardly differs
MAX_WIDTH = 8  # pixels; on wider images, joining them takes as long as it saves
MIN_CHANNELS = 128  # with fewer, joining takes longer than it saves


def fast_gradients(images: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which a net computes its convolutions so that their gradients are fast.

    Args:
        images: the net's input. On other devices than a CPU, or in another dtype than bfloat16, the context changes
            nothing.
    """
    if images.device.type == "cpu" and autocast_dtype(images) == torch.bfloat16:
        return _FastGradients()
    return nullcontext()


def autocast_dtype(maps: Tensor) -> torch.dtype:
    """Return the dtype in which maps are convolved: that of autocast if it is enabled, else their own."""
    kind = maps.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return maps.dtype


class _FastGradients(TorchFunctionMode):
    """Replace calls of `conv2d`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d:
            func = convolve
        return func(*args, **(kwargs or {}))


def convolve(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Return the same as `torch.nn.functional.conv2d`, computed so that the gradients in bfloat16 are fast."""
    dtype = autocast_dtype(maps)
    shape = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    is_handled = dtype == torch.bfloat16 and bias is None and not isinstance(padding, str)
    if is_handled and _is_slow(maps, weight, shape):
        return cast("Tensor", FastConvolution.apply(maps.type(dtype), weight.type(dtype), shape))
    return F.conv2d(maps, weight, bias, **shape)


def _is_slow(maps: Tensor, weight: Tensor, shape: Mapping[str, Any]) -> bool:
    """Return whether a convolution is depthwise, or has 3×3 weights and a padding of 1 pixel and gains by strips."""
    from cifar_lit.base.hardware import has_amx  # only bfloat16 on a CPU needs it

    if shape["groups"] == maps.shape[1] > 1:
        return True
    plain = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    if maps.shape[-1] > MAX_WIDTH or min(weight.shape[:2]) < MIN_CHANNELS:
        return False
    return weight.shape[2:] == (3, 3) and shape == plain and has_amx()


class FastConvolution(torch.autograd.Function):
    """A convolution whose gradients are computed in float32 if it is depthwise, else from strips of images."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, shape: Mapping[str, Any]) -> Tensor:
        """Return the convolution of maps (B, C, H, W). shape: stride, padding, dilation and groups."""
        ctx.save_for_backward(maps, weight)
        ctx.shape = shape
        return F.conv2d(maps, weight, **shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of the maps and of the weight, if required. Autograd rounds them to bfloat16."""
        maps, weight = ctx.saved_tensors
        is_depthwise = ctx.shape["groups"] > 1
        if is_depthwise:
            maps, weight, gradient = maps.float(), weight.float(), gradient.float()
        of_maps = of_weight = None
        if ctx.needs_input_grad[0]:
            of_maps = conv2d_input(maps.shape, weight, gradient, **ctx.shape)
        if ctx.needs_input_grad[1]:
            if not is_depthwise:
                maps, gradient = in_strips(maps), in_strips(gradient)
            of_weight = conv2d_weight(maps, weight.shape, gradient, **ctx.shape)
        return of_maps, of_weight, None


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
