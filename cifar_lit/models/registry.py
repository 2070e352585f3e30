"""From a net's name to the net: ours, torchvision's, or one of the user's own file.

A new net of ours is a builder and its line in `NETS`. A net from elsewhere is named by its import path (`my_nets.MyNet`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cifar_lit.errors import UsageError, first_line, nearest
from cifar_lit.models import whitened
from cifar_lit.models.torchvision_nets import build_torchvision_net, torchvision_names, torchvision_net_takes_any_size
from cifar_lit.models.tutorial_nets import fashion_cnn, lenet, shapenet, signs_mlp, tudui
from cifar_lit.plugins import import_callable, is_import_path


class NetSpec(NamedTuple):
    """How a net is built, and what it takes.

    build: called with the keywords channels, image_size (height, width), num_classes, width (see `build_net`) and the net's own
        options; gives a module that takes float images (B, channels, height, width) to logits (B, num_classes).
    min_size: the least height and width of images; a function of the options where these decide it.
    any_size: whether a net that was built for one size takes images of others too.
    options: the names of the net's own options; None where any may be given.
    """

    build: Callable[..., nn.Module]
    min_size: int | Callable[..., int] = 1
    any_size: bool = False
    options: tuple[str, ...] | None = ()


NETS: dict[str, NetSpec] = {
    "whitened": NetSpec(whitened.whitened, whitened.min_size, any_size=True, options=whitened.OPTIONS),
    "shapenet": NetSpec(shapenet, min_size=8, any_size=True),
    "tudui": NetSpec(tudui, min_size=8),
    "sjnet": NetSpec(tudui, min_size=8),  # the same net in another tutorial
    "lenet": NetSpec(lenet, min_size=16),
    "fashion_cnn": NetSpec(fashion_cnn, min_size=16),
    "signs_mlp": NetSpec(signs_mlp),
}


def net_names() -> list[str]:
    """Every name that `build_net` knows: ours first, then torchvision's."""
    return [*NETS, *torchvision_names()]


def build_net(
    name: str,
    *,
    channels: int,
    image_size: int | tuple[int, int],
    num_classes: int,
    width: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The net `name` with random weights.

    Args:
        name: one of `net_names()`, or an import path of a builder (see `NetSpec.build`) or of a `NetSpec`.
        channels: of the images.
        image_size: the side of square images, or (height, width), in pixels.
        num_classes: how many logits there are.
        width: multiplies the hidden widths of a net of ours; torchvision's have their own.
        options: plain values for the net's own options.

    Raises:
        UsageError: for an unknown name or option, values that cannot be meant, or images too small for the net.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    if channels < 1 or num_classes < 1 or min(size) < 1:
        raise UsageError(
            f"A net needs at least 1 channel, 1 class and 1 pixel, not {channels} channels, {num_classes} classes "
            f"and {size[0]}×{size[1]} pixels."
        )
    if not 0 < width < float("inf"):
        raise UsageError(f"width multiplies the hidden widths, so it must be above 0, not {width}.")
    spec = _spec(name)
    options = dict(options or {})
    known = spec.options if spec else ()
    for option in options:
        if known == ():
            raise UsageError(f"{name} has no options: leave model.net_options out, not {option!r}.")
        if known is not None and option not in known:
            raise UsageError(f"model.net_options of {name} has no {option!r}.{nearest(option, known)} It has {', '.join(known)}.")
    if spec is None:
        if width != 1:
            raise UsageError(f"width is for {', '.join(NETS)}; {name} has a width of its own, so leave width at 1.")
        return build_torchvision_net(name, channels=channels, image_size=size, num_classes=num_classes)

    min_size = spec.min_size if isinstance(spec.min_size, int) else spec.min_size(**options)
    if min(size) < min_size:
        raise UsageError(f"{name} cannot take {size[0]}×{size[1]} images; the least size is {min_size}×{min_size}.")
    settings = {"channels": channels, "image_size": size, "num_classes": num_classes, "width": width, **options}
    if name in NETS:
        return spec.build(**settings)
    try:
        net = spec.build(**settings)
    except TypeError as error:  # a builder with other arguments
        raise UsageError(f"{name} cannot be built with {', '.join(settings)}: {first_line(error)}") from error
    if not isinstance(net, nn.Module):
        raise UsageError(f"{name} must return a torch.nn.Module, not a {type(net).__name__}")
    return net


def takes_any_size(name: str) -> bool:
    """Whether the net `name`, built for one image size, takes others too, as training at several resolutions needs.

    Not smaller ones than it can be built for: build it for the smallest. Raises UsageError for an unknown name.
    """
    spec = _spec(name)
    return spec.any_size if spec else torchvision_net_takes_any_size(name)


def build_on_meta_device(name: str, **settings: Any) -> nn.Module:
    """`build_net(name, **settings)` with weights that have shapes and dtypes, but take no memory; raises what it raises."""
    with _WeightsOnMetaDevice():
        return build_net(name, **settings)


class _WeightsOnMetaDevice(TorchFunctionMode):
    """Layers' weights on the meta device; small tensors that builders compute with (as torchvision's regnets) stay real."""

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = {"device": "meta"} if func in (torch.empty, torch.zeros, torch.ones) else {}
        return func(*args, **{**(kwargs or {}), **place})


def _spec(name: str) -> NetSpec | None:
    """The spec of a net, None for torchvision's. Raises UsageError for an unknown name."""
    if name in NETS:  # before anything else: torchvision takes long to import
        return NETS[name]
    if is_import_path(name):
        target = import_callable(name)
        return target if isinstance(target, NetSpec) else NetSpec(target, options=_option_names(target))
    if name not in net_names():
        hint = nearest(name, net_names())
        raise UsageError(f"There is no net named {name!r}.{hint} There are {', '.join(NETS)} and torchvision's nets.")
    return None


def _option_names(build: Callable[..., Any]) -> tuple[str, ...] | None:
    """The arguments of a builder beyond those that every net gets; None where it takes any."""
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(name for name in parameters if name not in ("channels", "image_size", "num_classes", "width"))
