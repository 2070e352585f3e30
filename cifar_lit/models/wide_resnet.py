"""Wide residual networks (S. Zagoruyko and N. Komodakis, Wide Residual Networks, BMVC 2016)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from cifar_lit.base.errors import UsageError
from cifar_lit.models.registry import NetSpec
from cifar_lit.models.tutorial_nets import scaled

STEM = 16  # channels


class WideBlock(nn.Module):
    """Two 3×3 convolutions, each after a batch norm and ReLU, added to a shortcut.

    Maps (B, inputs, H, W) to (B, outputs, H / stride, W / stride). If the shape changes, the shortcut is a 1×1
    convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.activate = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        changes = inputs != outputs or stride != 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of branch and shortcut."""
        active = self.activate(x)
        output: Tensor = self.branch(active) + (x if self.shortcut is None else self.shortcut(active))
        return output


def wide_resnet(
    *,
    channels: int,
    image_size: tuple[int, int],
    num_classes: int,
    width: float,
    depth: int = 28,
    widen: int = 10,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return WRN-depth-widen: three groups of blocks at full, half and quarter resolution. WRN-28-10 by default.

    Args:
        width: multiplies the channels of all layers.
        depth: number of convolutions in the longest path, 6·n + 4 with n blocks per group.
        widen: the paper's k. The groups have 16·k, 32·k and 64·k channels.
        dropout: probability of dropout between the convolutions of a block.

    Raises:
        UsageError: the depth is invalid.
    """
    blocks, rest = divmod(depth - 4, 6)
    if rest:
        raise UsageError(f"model.net_options.depth must be 6·n + 4, such as 16, 28 or 40, not {depth!r}")
    widths = [scaled(STEM * factor, width) for factor in (1, widen, 2 * widen, 4 * widen)]
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)]
    for group, (inputs, outputs) in enumerate(pairwise(widths)):
        for block in range(blocks):
            stride = 2 if group and not block else 1
            layers.append(WideBlock(outputs if block else inputs, outputs, stride, dropout))
    norm = nn.BatchNorm2d(widths[-1])
    head = nn.Linear(widths[-1], num_classes)
    net = nn.Sequential(*layers, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(head.bias)
    return net


SPEC = NetSpec(wide_resnet, any_size=True, options=("depth", "widen", "dropout"))
