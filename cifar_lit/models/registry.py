"""Build nets by name: our own, torchvision's, timm's, or those of other modules.

To add a net, write a builder and add a line to `NETS`. Nets of other modules are named by import path
(`my_nets.MyNet`).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name

from torch import Tensor, nn

from cifar_lit.base.errors import UsageError, nearest
from cifar_lit.base.plugins import accepted_arguments, build_part, check_no_file, find_part, is_import_path, part_name
from cifar_lit.models.spec import TIMM, NetSpec

# Specs by name, or the place of one (MODULE:NAME): a module is imported when its net is used.
NETS: dict[str, NetSpec | str] = {
    "whitened": "cifar_lit.models.whitened:SPEC",
    "wide_resnet": "cifar_lit.models.wide_resnet:SPEC",
    "shapenet": "cifar_lit.models.tutorial_nets:SHAPENET",
    "tudui": "cifar_lit.models.tutorial_nets:TUDUI",
    "sjnet": "cifar_lit.models.tutorial_nets:TUDUI",  # the name of the same net in another tutorial
    "lenet": "cifar_lit.models.tutorial_nets:LENET",
    "fashion_cnn": "cifar_lit.models.tutorial_nets:FASHION_CNN",
    "signs_mlp": "cifar_lit.models.tutorial_nets:SIGNS_MLP",
}


def build_net(
    net: str | Callable[..., nn.Module] | NetSpec,
    *,
    channels: int,
    image_size: int | tuple[int, int],
    num_classes: int,
    width: float = 1.0,
    options: Mapping[str, object] | None = None,
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
    options, name = dict(options or {}), part_name(net)
    spec = check_net(net, options)
    min_size = spec.min_size if isinstance(spec.min_size, int) else spec.min_size(**options)
    if min(size) < min_size:
        raise UsageError(f"{name} cannot take {shape} images; the smallest size is {min_size}×{min_size}.")
    settings = {"channels": channels, "image_size": size, "num_classes": num_classes, "width": width, **options}
    if width != 1 and "width" not in accepted_arguments(spec.build, settings):
        raise UsageError(f"{name} takes no width: leave model.width at 1")
    built: nn.Module = build_part(spec.build, nn.Module, **settings)
    return built


def check_net(net: str | Callable[..., nn.Module] | NetSpec, options: Mapping[str, object]) -> NetSpec:
    """Return the spec of a net. Raise UsageError for an unknown name or option."""
    name, spec = part_name(net), net_spec(net)
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
        spec = NETS[name]
        if isinstance(spec, NetSpec):
            return spec
        return resolve_name(spec)
    if name.startswith(TIMM):
        from cifar_lit.models.pretrained import timm_spec

        return timm_spec(name)
    if not isinstance(net, str) or is_import_path(net):
        target = find_part(net)
        return target if isinstance(target, NetSpec) else NetSpec(target, options=_option_names(target))
    from torchvision import models

    from cifar_lit.models.torchvision_nets import FIXED_SIZE, build_torchvision_net

    names = [*NETS, *models.list_models(module=models)]
    if name not in names:
        check_no_file(name)
        valid = f"{', '.join(NETS)}, those of torchvision, and timm/NAME"
        raise UsageError(f"There is no net named {name!r}.{nearest(name, names)} Nets: {valid}.")
    return NetSpec(partial(build_torchvision_net, name), any_size=not name.startswith(FIXED_SIZE))


def _option_names(build: Callable[..., object]) -> tuple[str, ...] | None:
    """Return the names of a builder's own options; None if it accepts any."""
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(name for name in parameters if name not in ("channels", "image_size", "num_classes", "width"))


def with_versions(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Attach the `_metadata` of `net` (the versions of its modules) to tensors loaded from a file."""
    state = OrderedDict(tensors)
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    return state
