"""Build nets by name: our own, torchvision's, timm's, or those of other modules.

To add a net, write a builder and add a line to `NETS`. Nets of other modules are named by import path
(`my_nets.MyNet`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from cifar_lit.errors import UsageError, nearest
from cifar_lit.models.pretrained import OPTIONS as TIMM_OPTIONS
from cifar_lit.models.pretrained import TIMM, build_timm_net, takes_any_size
from cifar_lit.models.torchvision_nets import FIXED_SIZE, build_torchvision_net, torchvision_names
from cifar_lit.models.tutorial_nets import fashion_cnn, lenet, shapenet, signs_mlp, tudui
from cifar_lit.models.whitened import OPTIONS, WhitenedNet, min_size
from cifar_lit.models.wide_resnet import wide_resnet
from cifar_lit.plugins import accepted_arguments, build_part, check_no_file, find_part, is_import_path, part_name


class NetSpec(NamedTuple):
    """How to build a net, and the images and options that it accepts.

    Args:
        build: called with the keywords channels, image_size (height, width), num_classes, width (see `build_net`) and
            the net's own options. Returns a module that maps float images (B, channels, height, width) to logits (B,
            num_classes).
        min_size: smallest height and width of images in pixels, or a function of the options that returns it.
        any_size: whether a net built for one image size accepts other sizes too.
        options: names of the net's own options; None if it accepts any.
    """

    build: Callable[..., nn.Module]
    min_size: int | Callable[..., int] = 1
    any_size: bool = False
    options: tuple[str, ...] | None = ()


MAX_WIDTH = 1000.0
NETS: dict[str, NetSpec] = {
    "whitened": NetSpec(WhitenedNet, min_size, any_size=True, options=OPTIONS),
    "wide_resnet": NetSpec(wide_resnet, any_size=True, options=("depth", "widen", "dropout")),
    "shapenet": NetSpec(shapenet, min_size=8, any_size=True),
    "tudui": NetSpec(tudui, min_size=8),
    "sjnet": NetSpec(tudui, min_size=8),  # the name of the same net in another tutorial
    "lenet": NetSpec(lenet, min_size=16),
    "fashion_cnn": NetSpec(fashion_cnn, min_size=16),
    "signs_mlp": NetSpec(signs_mlp),
}


def build_net(
    net: str | Callable[..., nn.Module] | NetSpec,
    *,
    channels: int,
    image_size: int | tuple[int, int],
    num_classes: int,
    width: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the net `name` with random weights.

    Args:
        net: a key of `NETS`, a torchvision net, a timm net with the prefix "timm/", or a builder (see `NetSpec.build`)
            or a `NetSpec`, or the import path of one.
        channels: channels of the images.
        image_size: side of square images, or (height, width), in pixels.
        num_classes: number of logits.
        width: multiplier of the hidden widths of our own nets.
        options: values of the net's own options.

    Raises:
        UsageError: for an unknown name or option, invalid values, or images that are too small for the net.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    shape = f"{size[0]}×{size[1]}"
    if min(channels, num_classes, *size) < 1:
        raise UsageError(f"a net needs at least 1 channel, class and pixel, not {channels}, {num_classes} and {shape}")
    if not 0 < width <= MAX_WIDTH:
        raise UsageError(f"width, a multiplier, must be above 0 and at most {MAX_WIDTH:g}, not {width}")
    options, name = dict(options or {}), part_name(net)
    spec = check_net(net, options)
    min_size = spec.min_size if isinstance(spec.min_size, int) else spec.min_size(**options)
    if min(size) < min_size:
        raise UsageError(f"{name} cannot take {shape} images; the smallest size is {min_size}×{min_size}.")
    settings = {"channels": channels, "image_size": size, "num_classes": num_classes, "width": width, **options}
    if width != 1 and "width" not in accepted_arguments(spec.build, settings):
        raise UsageError(f"{name} takes no width: leave model.width at 1")
    built: nn.Module = build_part(spec.build, "model.net", nn.Module, **settings)
    return built


def check_net(net: str | Callable[..., nn.Module] | NetSpec, options: Mapping[str, Any]) -> NetSpec:
    """Return the spec of a net. Raise UsageError for an unknown name or option."""
    name = part_name(net)
    # Do not import timm, which takes seconds: `any_size` is not needed here.
    spec = NetSpec(partial(build_timm_net, name), options=TIMM_OPTIONS) if name.startswith(TIMM) else net_spec(net)
    for option in options:
        if spec.options is not None and option not in spec.options:
            valid = ", ".join(spec.options) or "none: leave model.net_options out"
            hint = nearest(option, spec.options)
            raise UsageError(f"model.net_options of {name} has no {option!r}.{hint} It has {valid}.")
    return spec


def net_spec(net: str | Callable[..., nn.Module] | NetSpec) -> NetSpec:
    """Return the spec of a net. Raise UsageError for an unknown name."""
    name = part_name(net)
    if name in NETS:  # checked first, because torchvision is slow to import
        return NETS[name]
    if name.startswith(TIMM):
        return NetSpec(partial(build_timm_net, name), any_size=takes_any_size(name), options=TIMM_OPTIONS)
    if not isinstance(net, str) or is_import_path(net):
        target = find_part(net, "model.net", NetSpec)
        return target if isinstance(target, NetSpec) else NetSpec(target, options=_option_names(target))
    names = [*NETS, *torchvision_names()]
    if name not in names:
        check_no_file(name)
        valid = f"{', '.join(NETS)}, those of torchvision, and timm/NAME"
        raise UsageError(f"There is no net named {name!r}.{nearest(name, names)} Nets: {valid}.")
    return NetSpec(partial(build_torchvision_net, name), any_size=not name.startswith(FIXED_SIZE))


def _option_names(build: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of a builder's own options; None if it accepts any."""
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(name for name in parameters if name not in ("channels", "image_size", "num_classes", "width"))
