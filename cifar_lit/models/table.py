"""From a net's name to the net: ours, then torchvision's. A new net is one builder and one line in `NETS`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import nn

from cifar_lit.errors import UsageError, nearest
from cifar_lit.models.seeds import fashion_cnn, lenet, signs_mlp, tudui
from cifar_lit.models.shapenet import shapenet


class Builder(Protocol):
    """Makes a net from images (B, channels, *image_size) to logits (B, num_classes); `width` multiplies its hidden widths."""

    def __call__(self, *, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
        """The net with random weights."""


class Entry(NamedTuple):
    """A builder and the least height and width of images that its net can take."""

    build: Builder
    least: int


NETS: dict[str, Entry] = {
    "shapenet": Entry(shapenet, least=8),
    "tudui": Entry(tudui, least=8),
    "sjnet": Entry(tudui, least=8),  # the same net in another tutorial
    "lenet": Entry(lenet, least=16),
    "fashion_cnn": Entry(fashion_cnn, least=16),
    "signs_mlp": Entry(signs_mlp, least=1),
}


def net_names() -> list[str]:
    """Every name that `build_net` knows: ours first, then torchvision's."""
    from cifar_lit.models.vision import vision_names

    return [*NETS, *vision_names()]


def build_net(name: str, *, channels: int, image_size: int | tuple[int, int], num_classes: int, width: float = 1.0) -> nn.Module:
    """The net `name` with random weights: float images (B, channels, height, width) to logits (B, num_classes).

    image_size: the side of square images, or (height, width), in pixels.
    width: multiplies the hidden widths of a net of ours; torchvision's have their own.

    Raises UsageError for an unknown name, numbers that cannot be meant, or images too small for the net.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    if channels < 1 or num_classes < 1 or min(size) < 1:
        raise UsageError(
            f"A net needs at least 1 channel, 1 class and 1 pixel, not {channels} channels, {num_classes} classes "
            f"and {size[0]}×{size[1]} pixels."
        )
    if not 0 < width < float("inf"):
        raise UsageError(f"width multiplies the hidden widths, so it must be above 0, not {width}.")
    if name in NETS:
        entry = NETS[name]
        if min(size) < entry.least:
            raise UsageError(f"{name} cannot take {size[0]}×{size[1]} images; the least size is {entry.least}×{entry.least}.")
        return entry.build(channels=channels, image_size=size, num_classes=num_classes, width=width)

    from cifar_lit.models.vision import build_vision, vision_names

    if name not in vision_names():
        ours = ", ".join(NETS)
        raise UsageError(f"There is no net named {name!r}.{nearest(name, net_names())} There are {ours} and torchvision's nets.")
    if width != 1:
        raise UsageError(f"width is for {', '.join(NETS)}; {name} has a width of its own, so leave width at 1.")
    return build_vision(name, channels=channels, image_size=size, num_classes=num_classes)
