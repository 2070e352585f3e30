"""`shapenet`: the small net of the quickstart, for seconds of training on a processor."""

from __future__ import annotations

from torch import nn

from cifar_lit.models.seeds import scaled


def shapenet(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Four 3×3 convolutions of 16, 32, 64 and 128 channels with batch norm and ReLU, pooled between, then averaged.

    Takes any `image_size` from 8×8 on. The first convolution, the only one at full size, is narrow: on two CPU cores a net that
    starts with 32 channels takes twice as long for the same accuracy on `shapes`.
    """
    layers: list[nn.Module] = []
    inputs = channels
    for units in (16, 32, 64, 128):
        outputs = scaled(units, width)
        if layers:
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
