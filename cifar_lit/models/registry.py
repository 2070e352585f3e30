"""From a net's name to the net: ours, torchvision's, timm's, or one of the user's own file.

A new net of ours is a builder and its line in `NETS`. A net from elsewhere is named by its import path (`my_nets.MyNet`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from cifar_lit.errors import UsageError, first_line, nearest
from cifar_lit.models.pretrained import OPTIONS as TIMM_OPTIONS
from cifar_lit.models.pretrained import TIMM, build_timm_net, takes_any_size
from cifar_lit.models.torchvision_nets import FIXED_SIZE, build_torchvision_net, torchvision_names
from cifar_lit.models.tutorial_nets import fashion_cnn, lenet, shapenet, signs_mlp, tudui
from cifar_lit.models.whitened import OPTIONS, WhitenedNet, min_size
from cifar_lit.plugins import check_no_file, import_callable, is_import_path


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


MAX_WIDTH = 1000.0  # times the hidden widths
NETS: dict[str, NetSpec] = {
    "whitened": NetSpec(WhitenedNet, min_size, any_size=True, options=OPTIONS),
    "shapenet": NetSpec(shapenet, min_size=8, any_size=True),
    "tudui": NetSpec(tudui, min_size=8),
    "sjnet": NetSpec(tudui, min_size=8),  # the same net in another tutorial
    "lenet": NetSpec(lenet, min_size=16),
    "fashion_cnn": NetSpec(fashion_cnn, min_size=16),
    "signs_mlp": NetSpec(signs_mlp),
}


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
        name: a key of `NETS`, a net of torchvision's, one of timm's behind "timm/", or an import path of a builder (see
            `NetSpec.build`) or of a `NetSpec`.
        image_size: the side of square images, or (height, width), in pixels.
        width: multiplies the hidden widths of a net of ours; torchvision's have their own.
        options: plain values for the net's own options.

    Raises:
        UsageError: for an unknown name or option, values that cannot be meant, or images too small for the net.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    shape = f"{size[0]}×{size[1]}"
    if min(channels, num_classes, *size) < 1:
        raise UsageError(f"A net needs 1 channel, class and pixel at least, not {channels}, {num_classes} and {shape}.")
    if not 0 < width <= MAX_WIDTH:
        raise UsageError(
            f"width multiplies the hidden widths: it must be above 0 and at most {MAX_WIDTH:g}, not {width}."
        )
    options = dict(options or {})
    spec = check_net(name, options)
    min_size = spec.min_size if isinstance(spec.min_size, int) else spec.min_size(**options)
    if min(size) < min_size:
        raise UsageError(f"{name} cannot take {shape} images; the least size is {min_size}×{min_size}.")
    settings = {"channels": channels, "image_size": size, "num_classes": num_classes, "width": width, **options}
    try:
        net = spec.build(**settings)
    except TypeError as error:  # a user's builder with other arguments
        raise UsageError(f"{name} cannot be built with {', '.join(settings)}: {first_line(error)}") from error
    if not isinstance(net, nn.Module):
        raise UsageError(f"{name} must return a torch.nn.Module, not a {type(net).__name__}")
    return net


def check_net(name: str, options: Mapping[str, Any]) -> NetSpec:
    """Return how a net is built; raise UsageError for an unknown name or option."""
    # Refuse wrong options of timm's nets before timm is imported, which takes seconds.
    spec = NetSpec(partial(build_timm_net, name), options=TIMM_OPTIONS) if name.startswith(TIMM) else net_spec(name)
    for option in options:
        if spec.options is not None and option not in spec.options:
            known = ", ".join(spec.options) or "none: leave model.net_options out"
            raise UsageError(
                f"model.net_options of {name} has no {option!r}.{nearest(option, spec.options)} It has {known}."
            )
    return spec


def net_spec(name: str) -> NetSpec:
    """Return how a net is built, whoever wrote it; raise UsageError for an unknown name."""
    if name in NETS:  # before anything else: torchvision takes long to import
        return NETS[name]
    if name.startswith(TIMM):
        return NetSpec(partial(build_timm_net, name), any_size=takes_any_size(name), options=TIMM_OPTIONS)
    if is_import_path(name):
        target = import_callable(name)
        return target if isinstance(target, NetSpec) else NetSpec(target, options=_option_names(target))
    names = [*NETS, *torchvision_names()]
    if name not in names:
        check_no_file(name)
        raise UsageError(
            f"There is no net named {name!r}.{nearest(name, names)} There are {', '.join(NETS)}, torchvision's and timm/NAME."
        )
    fixed = name.startswith(FIXED_SIZE)  # a position's embedding, or windows, for one size only; the others pool
    return NetSpec(partial(build_torchvision_net, name), any_size=not fixed)


def _option_names(build: Callable[..., Any]) -> tuple[str, ...] | None:
    """The arguments of a builder beyond those that every net gets; None where it takes any."""
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(name for name in parameters if name not in ("channels", "image_size", "num_classes", "width"))
