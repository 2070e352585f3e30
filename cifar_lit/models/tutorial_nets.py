"""`shapenet`: the small net of the quickstart, for seconds of training on a processor."""

from __future__ import annotations

from torch import nn

# ---- The nets of the tutorials that this project replaces, layer for layer; each takes any input size, channels and classes.
#
# All are `nn.Sequential`: float images (B, channels, height, width) in, logits (B, num_classes) out. `nn.Flatten` reads images in
# NCHW order whatever their memory format, so that weights carry over between the two formats.


def scaled(units: int, width: float) -> int:
    """`units` channels or hidden units times `width`, rounded, at least one."""
    return max(1, round(units * width))


def tudui(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Three 5×5 convolutions with max pooling and two linear layers, and no activation anywhere (seeds 000 and 003)."""
    narrow, wide = scaled(32, width), scaled(64, width)
    height, breadth = (side // 8 for side in image_size)
    return nn.Sequential(
        nn.Conv2d(channels, narrow, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Conv2d(narrow, narrow, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Conv2d(narrow, wide, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(wide * height * breadth, wide),
        nn.Linear(wide, num_classes),
    )


def signs_mlp(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Pixels through hidden layers of 25 and 16 units with ReLU (seed 001)."""
    first, second = scaled(25, width), scaled(16, width)
    height, breadth = image_size
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * breadth, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, num_classes),
    )


def lenet(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """LeNet-5 in its ReLU and max-pooling form (seed 002)."""
    return _lenet_like(
        channels, image_size, num_classes, (scaled(6, width), scaled(16, width)), (scaled(120, width), scaled(84, width))
    )


def fashion_cnn(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """LeNet's smaller sibling for 28×28 grey images (seed 004)."""
    return _lenet_like(
        channels, image_size, num_classes, (scaled(6, width), scaled(12, width)), (scaled(120, width), scaled(60, width))
    )


def _lenet_like(
    channels: int, image_size: tuple[int, int], num_classes: int, convolved: tuple[int, int], hidden: tuple[int, int]
) -> nn.Module:
    height, breadth = (((side - 4) // 2 - 4) // 2 for side in image_size)  # two 5×5 convolutions without padding, each halved
    return nn.Sequential(
        nn.Conv2d(channels, convolved[0], 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(convolved[0], convolved[1], 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(convolved[1] * height * breadth, hidden[0]),
        nn.ReLU(),
        nn.Linear(hidden[0], hidden[1]),
        nn.ReLU(),
        nn.Linear(hidden[1], num_classes),
    )


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
