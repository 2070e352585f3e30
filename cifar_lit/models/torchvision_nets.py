"""torchvision's classification nets, adapted to small images and any number of channels.

torchvision.models is imported on first use, because the import takes seconds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# He et al. 2016, section 4.2: for 32×32 images the ResNet stem is one 3×3 convolution without stride or pooling.
SMALL_STEM = ("resnet18", "resnet34", "resnet50")
MAX_SMALL = 64  # pixels of the shorter side of small images; for larger images this stem costs 16 times the work
INCEPTIONS = ("googlenet", "inception_v3")  # their weights come from TensorFlow
FIXED_SIZE = ("vit_", "maxvit_")  # prefixes of nets that accept only the image size they were built for


def build_torchvision_net(name: str, *, channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """Return the torchvision net `name` with random weights; see `registry.build_net`.

    For small images, nets of `SMALL_STEM` get a small stem. Other nets change only the channels of the first
    convolution.
    """
    from torchvision import models

    net = models.get_model(name, weights=None, num_classes=num_classes, **_builder_settings(name, image_size))
    if name in SMALL_STEM and min(image_size) <= MAX_SMALL:
        net.conv1 = nn.Conv2d(3, net.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # torchvision's initialisation
        net.maxpool = nn.Identity()
    if channels != 3:  # Replace the first convolution; initialise its weights with the same standard deviation.
        path, old = next((path, module) for path, module in net.named_modules() if isinstance(module, nn.Conv2d))
        settings: Any = {name: getattr(old, name) for name in ("kernel_size", "stride", "padding")}
        new = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **settings)
        if not old.weight.is_meta:
            nn.init.normal_(new.weight, std=float(old.weight.detach().std()))
        net.set_submodule(path, new)
    return net


def _builder_settings(name: str, image_size: tuple[int, int]) -> dict[str, object]:
    if name.startswith("vit_"):
        return {"image_size": image_size[0]}
    if name.startswith("maxvit_"):
        return {"input_size": image_size}
    if name in INCEPTIONS:
        # Without auxiliary heads, forward returns a tensor. An explicit init_weights silences a warning.
        return {"aux_logits": False, "init_weights": False}
    return {}
