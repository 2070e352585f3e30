"""The nets of the tutorials that this project replaces, layer for layer, and `shapenet`, the small net of the quickstart.

All are `nn.Sequential`: float images (B, channels, height, width) in, logits (B, num_classes) out, for any size, channels and
classes. `nn.Flatten` reads images in NCHW order whatever their memory format, so weights carry over between the two formats.
"""

from __future__ import annotations

from functools import partial

from torch import nn


def scaled(units: int, width: float) -> int:
    """`units` channels or hidden units times `width`, rounded, at least one."""
    return max(1, round(units * width))


def tudui(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Three 5×5 convolutions with max pooling and two linear layers, and no activation anywhere (seeds 000 and 003)."""
    narrow, wide = scaled(32, width), scaled(64, width)
    rows, columns = (side // 8 for side in image_size)
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
    """Pixels through hidden layers of 25 and 16 units with ReLU (seed 001)."""
    return nn.Sequential(nn.Flatten(), *_mlp(channels * image_size[0] * image_size[1], 25, 16, num_classes, width))


def lenet(
    *,
    channels: int,
    image_size: tuple[int, int],
    num_classes: int,
    width: float,
    units: tuple[int, int, int, int] = (6, 16, 120, 84),
) -> nn.Module:
    """LeNet-5 in its ReLU and max-pooling form (seed 002)."""
    first, second = scaled(units[0], width), scaled(units[1], width)
    rows, columns = (
        ((side - 4) // 2 - 4) // 2 for side in image_size
    )  # two 5×5 convolutions without padding, each halved
    layers = [
        nn.Conv2d(channels, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *_mlp(second * rows * columns, *units[2:], num_classes, width))


fashion_cnn = partial(lenet, units=(6, 12, 120, 60))  # LeNet's smaller sibling for 28×28 grey images (seed 004)


def _mlp(inputs: int, first: int, second: int, outputs: int, width: float) -> list[nn.Module]:
    first, second = scaled(first, width), scaled(second, width)
    return [nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, outputs)]


def shapenet(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Four 3×3 convolutions of 16, 32, 64 and 128 channels with batch norm and ReLU, pooled between, then averaged.

    Takes any `image_size` from 8×8 on. The first convolution, the only one at full size, is narrow: on two CPU cores a net that
    starts with 32 channels takes twice as long for the same accuracy on `shapes`.
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
