"""From a net's name to the net: ours, then torchvision's. A new net is one builder and one line in `NETS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from cifar_lit.errors import UsageError, nearest
from cifar_lit.models import whitened
from cifar_lit.models.tutorial_nets import fashion_cnn, lenet, shapenet, signs_mlp, tudui


class Entry(NamedTuple):
    """How a net of ours is built, and what it takes.

    build: makes the net from the keywords channels, image_size (height, width), num_classes and width, which multiplies the
        hidden widths, and from options of the net's own. Images (B, channels, *image_size) to logits (B, num_classes).
    least: the least height and width of images; a function of the options where these decide it.
    any_size: whether a net that was built for one size takes images of others too.
    options: the names of the net's own options.
    """

    build: Callable[..., nn.Module]
    least: int | Callable[..., int]
    any_size: bool = False
    options: tuple[str, ...] = ()


NETS: dict[str, Entry] = {
    "whitened": Entry(whitened.whitened, whitened.least_side, any_size=True, options=whitened.OPTIONS),
    "shapenet": Entry(shapenet, least=8, any_size=True),
    "tudui": Entry(tudui, least=8),
    "sjnet": Entry(tudui, least=8),  # the same net in another tutorial
    "lenet": Entry(lenet, least=16),
    "fashion_cnn": Entry(fashion_cnn, least=16),
    "signs_mlp": Entry(signs_mlp, least=1),
}


def net_names() -> list[str]:
    """Every name that `build_net` knows: ours first, then torchvision's."""
    from cifar_lit.models.torchvision_nets import vision_names

    return [*NETS, *vision_names()]


def build_net(
    name: str,
    *,
    channels: int,
    image_size: int | tuple[int, int],
    num_classes: int,
    width: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The net `name` with random weights: float images (B, channels, height, width) to logits (B, num_classes).

    image_size: the side of square images, or (height, width), in pixels.
    width: multiplies the hidden widths of a net of ours; torchvision's have their own.
    options: plain values for a net that has options of its own; `NETS` says which.

    Raises UsageError for an unknown name or option, values that cannot be meant, or images too small for the net.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    if channels < 1 or num_classes < 1 or min(size) < 1:
        raise UsageError(
            f"A net needs at least 1 channel, 1 class and 1 pixel, not {channels} channels, {num_classes} classes "
            f"and {size[0]}×{size[1]} pixels."
        )
    if not 0 < width < float("inf"):
        raise UsageError(f"width multiplies the hidden widths, so it must be above 0, not {width}.")
    _check_name(name)
    options = dict(options or {})
    _check_options(name, options)
    if name in NETS:
        entry = NETS[name]
        least = entry.least if isinstance(entry.least, int) else entry.least(**options)
        if min(size) < least:
            raise UsageError(f"{name} cannot take {size[0]}×{size[1]} images; the least size is {least}×{least}.")
        return entry.build(channels=channels, image_size=size, num_classes=num_classes, width=width, **options)

    from cifar_lit.models.torchvision_nets import build_vision

    if width != 1:
        raise UsageError(f"width is for {', '.join(NETS)}; {name} has a width of its own, so leave width at 1.")
    return build_vision(name, channels=channels, image_size=size, num_classes=num_classes)


def takes_any_size(name: str) -> bool:
    """Whether the net `name`, built for one image size, takes others too, as training at several resolutions needs.

    Not smaller ones than it can be built for: build it for the smallest. Raises UsageError for an unknown name.
    """
    _check_name(name)
    if name in NETS:
        return NETS[name].any_size

    from cifar_lit.models.torchvision_nets import vision_takes_any_size

    return vision_takes_any_size(name)


def _check_name(name: str) -> None:
    if name not in NETS and name not in net_names():  # the first saves importing torchvision for a net of ours
        ours = ", ".join(NETS)
        raise UsageError(f"There is no net named {name!r}.{nearest(name, net_names())} There are {ours} and torchvision's nets.")


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    known = NETS[name].options if name in NETS else ()
    for option in options:
        if not known:
            raise UsageError(f"{name} has no options: leave model.net_options out, not {option!r}.")
        if option not in known:
            raise UsageError(f"model.net_options of {name} has no {option!r}.{nearest(option, known)} It has {', '.join(known)}.")
