"""Checks of a net before training: its output shape for blank images, and a build that allocates no memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cifar_lit.base.errors import UsageError, first_line
from cifar_lit.models.registry import build_net


def check_shapes(net: nn.Module, name: str, input_shape: Sequence[int], num_classes: int) -> None:
    """Raise UsageError unless `net` maps images (B, *input_shape) to logits (B, num_classes).

    Two blank images pass through the net in evaluation mode. Weights, buffers, modes and the CPU's random state do not
    change.
    """
    weight = next(net.parameters(), torch.empty(0))
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = net(weight.new_zeros(2, *input_shape))
    except Exception as error:
        if _NEEDS_GPU.search(str(error)):
            return  # the net only has GPU kernels, and is still on the CPU
        images = f"images of {'×'.join(map(str, input_shape))} (channels, height, width)"
        remedy = "Build the net for its arguments channels and image_size."
        reason = f"{_failed_layer(net, error)}{first_line(error).rstrip('.')}"
        raise UsageError(f"{name} cannot take {images}: {reason}. {remedy}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    shape = tuple(getattr(output, "shape", ()))
    if shape != (2, num_classes):
        fault = f"returns a {type(output).__name__} of shape {shape} for 2 images, not (2, {num_classes})"
        remedy = f"the data have {num_classes} classes, so its last layer must have num_classes outputs"
        raise UsageError(f"{name} {fault}: {remedy}")


_NEEDS_GPU = re.compile("cuda|gpu|triton|device", re.IGNORECASE)


def _failed_layer(net: nn.Module, error: Exception) -> str:
    """Return a clause that names the leaf layer in which an error was raised; "" for an error outside a leaf layer."""
    names = {module: name for name, module in net.named_modules() if module is not net}
    modules = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    layers = [module for module in modules if isinstance(module, nn.Module) and module in names]
    if not layers or any(layers[-1].children()):
        return ""
    return f"its layer {names[layers[-1]]}, {layers[-1]}, fails with "


def build_on_meta_device(name: str, **settings: Any) -> nn.Module:
    """Return `build_net(name, **settings)` with its weights on the meta device, where they take no memory."""
    with _WeightsOnMetaDevice():
        return build_net(name, **settings)


class _WeightsOnMetaDevice(TorchFunctionMode):
    """Create weights on the meta device. Other tensors stay real, because torchvision's regnets use their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        device = {"device": "meta"} if func in (torch.empty, torch.zeros, torch.ones) else {}
        return func(*args, **{**(kwargs or {}), **device})
