"""Embeddings: what a net's last layer is given, the net's own description of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def logits_and_embeddings(net: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, classes) and embeddings float32 (B, features) of float images (B, C, H, W), in one pass through `net`.

    The embedding is the input of the last linear or convolutional layer that the pass comes to; of maps, the mean over
    their places. Both come without gradient. net: any of the table's, in evaluation mode.
    """
    last: list[Tensor] = []

    def note(_: nn.Module, inputs: Any) -> None:
        last[:] = [inputs[0]]

    layers = [module for module in net.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.no_grad():
            logits: Tensor = net(images)
    finally:
        for hook in hooks:
            hook.remove()
    maps = last[0].float()
    return logits, maps.mean((2, 3)) if maps.ndim == 4 else maps.flatten(1)
