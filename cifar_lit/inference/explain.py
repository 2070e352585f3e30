"""Class-activation maps: where in an image a net finds its class.

The method is HiResCAM (Draelos & Carin, "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional
neural networks", 2020), a form of Grad-CAM (Selvaraju et al., ICCV 2017). It uses the gradient at each position.
Grad-CAM uses the mean over all positions, which is less informative in nets with max pooling.

Measured on 100 test images of CIFAR-10 (JPEG) with the net of fast94, whose mean probability is 0.72: masking the
quarter of the positions with the highest values lowers the probability by 0.46 (Grad-CAM: 0.40, random positions: 0.29,
the middle of the image, where most objects are: 0.48).
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.errors import UsageError
from cifar_lit.inference.classify import GAP, LINE_HEIGHT, draw_caption
from cifar_lit.runs.model_file import LoadedNet, batch_size_of
from cifar_lit.runs.predictions import Row

MIN_MAP_SIDE = 4  # smaller feature maps localise poorly
MAX_DISTORTION = 2  # between the proportions of a map and of the image
SIDE = 256  # pixels of each of the two images


def activation_maps(net: LoadedNet, images: Tensor) -> Tensor:
    """Return the contribution of each position to the most probable class.

    The last feature maps of at least 4 × 4 positions are multiplied by the gradient of the class's logit, and summed
    over the channels. Negative values become 0. The result is scaled to the size of the image and to a maximum of 1.

    Args:
        images: uint8 (B, C, H, W), B > 0.

    Returns:
        float32 (B, H, W) in 0 … 1, on the CPU; all 0 if no position contributes to the class.

    Raises:
        UsageError: the net has no such feature maps.
    """
    return torch.cat([_maps_at_once(net, batch) for batch in images.split(batch_size_of(images))])


def _maps_at_once(net: LoadedNet, images: Tensor) -> Tensor:
    features: list[Tensor] = []

    def keep_features(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or output.ndim != 4 or min(output.shape[2:]) < MIN_MAP_SIDE:
            return None
        (height, width), (whole_height, whole_width) = output.shape[2:], images.shape[2:]
        sides = height * whole_width, width * whole_height
        if max(sides) > MAX_DISTORTION * min(sides):  # probably (B, H, W, C) instead of (B, C, H, W)
            return None
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        features[:] = [output]
        return features[0].clone()  # the next layer may change it in place

    with torch.enable_grad(), ExitStack() as hooks:
        for module in net.net.modules():
            hooks.enter_context(module.register_forward_hook(keep_features))
        logits = net(images.to(net.mean.device))
    if not features:
        size = f"{MIN_MAP_SIDE} × {MIN_MAP_SIDE}"
        raise UsageError(f"{net.card.net} has no feature maps of {size} or more: leave --explain out")
    (gradients,) = torch.autograd.grad(logits.max(1).values.sum(), features)
    raw = F.relu((gradients * features[0].detach()).sum(1, keepdim=True)).float()
    maps = F.interpolate(raw, size=images.shape[2:], mode="bilinear", align_corners=False)[:, 0].cpu()
    return maps / maps.amax((1, 2), keepdim=True).clamp_min(1e-12)


def draw_explanation(row: Row, image: Tensor, activation: Tensor) -> Image.Image:
    """Draw the net's input, uint8 (C, H, W), beside a copy coloured by its activation map, float32 (H, W)."""
    import matplotlib

    net_view = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).expand(-1, -1, 3).numpy()))
    scale = SIDE / max(net_view.size)
    width, height = (max(round(side * scale), 1) for side in net_view.size)
    net_view = net_view.resize((width, height), Image.Resampling.BICUBIC)
    colours = (matplotlib.colormaps["inferno"](activation.numpy())[:, :, :3] * 255).astype(np.uint8)
    heat = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
    sheet = Image.new("RGB", (2 * width + 3 * GAP, height + 2 * GAP + 3 * LINE_HEIGHT), "white")
    sheet.paste(net_view, (GAP, GAP))
    sheet.paste(Image.blend(net_view.convert("L").convert("RGB"), heat, 0.6), (2 * GAP + width, GAP))
    draw_caption(sheet, row, GAP, GAP + height + 2, 2 * width + GAP)
    return sheet
