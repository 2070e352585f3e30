"""From a net's name to the net: ours, torchvision's, timm's, or one of the user's own file.

A new net of ours is a builder and its line in `NETS`. A net from elsewhere is named by its import path (`my_nets.MyNet`).
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
        raise UsageError(f"width multiplies the hidden widths: it must be above 0 and at most {MAX_WIDTH:g}, not {width}.")
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
            raise UsageError(f"model.net_options of {name} has no {option!r}.{nearest(option, spec.options)} It has {known}.")
    return spec


def check_shapes(net: nn.Module, name: str, input_shape: Sequence[int], num_classes: int) -> None:
    """Raise UsageError unless `net` takes images (B, *input_shape) to logits (B, num_classes).

    Two blank images pass through the net in evaluation mode. Its weights, buffers and modes stay as they are, and so does
    torch's random number generator.
    """
    weight = next(net.parameters(), torch.empty(0))
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = net(weight.new_zeros(2, *input_shape))
    except Exception as error:
        if _NEEDS_GPU.search(str(error)):
            return  # a net with kernels for GPUs only, built on the CPU
        images = f"images of {'×'.join(map(str, input_shape))} (channels, height, width)"
        remedy = "A net must be built for its arguments channels and image_size."
        reason = f"{_failed_layer(net, error)}{first_line(error).rstrip('.')}"
        raise UsageError(f"{name} cannot take {images}: {reason}. {remedy}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(output, Tensor):
        raise UsageError(f"{name} must return a tensor of logits (images, {num_classes}), not a {type(output).__name__}")
    if tuple(output.shape) != (2, num_classes):
        shape = f"returns a tensor of shape {tuple(output.shape)} for 2 images, not (2, {num_classes})"
        raise UsageError(f"{name} {shape}: the data have {num_classes} classes, so its last layer must have num_classes outputs")


_NEEDS_GPU = re.compile("cuda|gpu|triton|device", re.IGNORECASE)


def _failed_layer(net: nn.Module, error: Exception) -> str:
    """Return the layer without children that an error was raised in, as the beginning of a sentence; '' if there is none."""
    names = {module: name for name, module in net.named_modules()}
    modules = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    layers = [module for module in modules if isinstance(module, nn.Module) and module in names]
    if not layers or layers[-1] is net or any(layers[-1].children()):
        return ""
    return f"its layer {names[layers[-1]]}, {layers[-1]}, fails with "


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


def with_versions(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a state dict of `net`, which names its modules' versions: torch keeps them beside the tensors, files do not."""
    state = OrderedDict(tensors)
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    return state


def build_on_meta_device(name: str, **settings: Any) -> nn.Module:
    """`build_net(name, **settings)` with weights that have shapes and dtypes, but take no memory; raises what it raises."""
    with _WeightsOnMetaDevice():
        return build_net(name, **settings)


class _WeightsOnMetaDevice(TorchFunctionMode):
    """Layers' weights on the meta device; small tensors that builders compute with (as torchvision's regnets) stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        place = {"device": "meta"} if func in (torch.empty, torch.zeros, torch.ones) else {}
        return func(*args, **{**(kwargs or {}), **place})
