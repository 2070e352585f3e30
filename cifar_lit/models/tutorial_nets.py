"""Nets of the tutorials that this project replaces, and `shapenet`, the small net of the quickstart.

All are `nn.Sequential` modules that map float images (B, channels, height, width) to logits (B, num_classes).
"""

from __future__ import annotations

from functools import partial

from torch import nn


def scaled(units: int, width: float) -> int:
    """Return the number of channels or hidden units times `width`, rounded, at least 1."""
    return max(1, round(units * width))


def tudui(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Return a net of three 5×5 convolutions with max pooling and two linear layers, without any activation."""
    narrow, wide = scaled(32, width), scaled(64, width)
    rows, columns = (max(1, side // 8) for side in image_size)
    return nn.Sequential(
        nn.Conv2d(channels, narrow, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Conv2d(narrow, narrow, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Conv2d(narrow, wide, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(wide * rows * columns, wide),
        nn.Linear(wide, num_classes),
    )


def signs_mlp(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Return a multilayer perceptron with hidden layers of 25 and 16 units and ReLU."""
    return nn.Sequential(nn.Flatten(), *_mlp(channels * image_size[0] * image_size[1], 25, 16, num_classes, width))


def _lenet(
    units: tuple[int, int, int, int], *, channels: int, image_size: tuple[int, int], num_classes: int, width: float
) -> nn.Module:
    """Return LeNet-5 with ReLU and max pooling. units: widths of the two convolutions and the two hidden layers."""
    first, second = scaled(units[0], width), scaled(units[1], width)
    # 5×5 without padding, then pooled, twice. For images that are too small, the pooling raises an error.
    rows, columns = (max(1, ((side - 4) // 2 - 4) // 2) for side in image_size)
    layers = [
        nn.Conv2d(channels, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *_mlp(second * rows * columns, *units[2:], num_classes, width))


lenet = partial(_lenet, (6, 16, 120, 84))
fashion_cnn = partial(_lenet, (6, 12, 120, 60))  # a smaller LeNet for 28×28 grey images


def _mlp(inputs: int, first: int, second: int, outputs: int, width: float) -> list[nn.Module]:
    first, second = scaled(first, width), scaled(second, width)
    return [nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, outputs)]


def shapenet(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Return a net of four 3×3 convolutions of 16, 32, 64 and 128 channels, with batch norm, ReLU and pooling.

    It accepts any `image_size` from 8×8. The first convolution is narrow because it runs at full resolution. On two CPU
    cores, 32 channels instead of 16 take twice as long for the same accuracy on `shapes`.
    """
    layers: list[nn.Module] = []
    for units in (16, 32, 64, 128):
        inputs, channels = channels, scaled(units, width)
        layers += [
            nn.Conv2d(inputs, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
