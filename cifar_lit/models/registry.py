"""Build and check nets by name: our own, torchvision's, timm's, or those of other modules.

A builder is a class or function. It is called with the keywords channels, image_size (height, width), num_classes,
width (see `build_net`) and the net's own options, as far as its signature has them. It returns a module that maps float
images (B, channels, height, width) to logits (B, num_classes).

To add a net, write a builder and add a line to `NETS`. Nets of other modules are named by import path
(`my_nets.MyNet`).
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor, nn

from cifar_lit.base.errors import UsageError, first_line, nearest
from cifar_lit.base.plugins import (
    accepted_arguments,
    build_part,
    check_no_file,
    find_part,
    is_import_path,
    part_name,
)
from cifar_lit.base.text import note_once

Builder = Callable[..., nn.Module]
ARGUMENTS = ("channels", "image_size", "num_classes", "width")  # Others are the net's own options.

# Builders by name, or the place of one (MODULE:NAME): a module is imported when its net is used.
NETS: dict[str, Builder | str] = {
    "whitened": "cifar_lit.models.whitened:WhitenedNet",
    "shapenet": "cifar_lit.models.tutorial_nets:shapenet",
    "tudui": "cifar_lit.models.tutorial_nets:tudui",
    "sjnet": "cifar_lit.models.tutorial_nets:tudui",  # the name of the same net in another tutorial
    "lenet": "cifar_lit.models.tutorial_nets:lenet",
    "fashion_cnn": "cifar_lit.models.tutorial_nets:fashion_cnn",
    "signs_mlp": "cifar_lit.models.tutorial_nets:signs_mlp",
}


def build_net(
    net: str | Builder,
    *,
    channels: int,
    image_size: int | tuple[int, int],
    num_classes: int,
    width: float = 1.0,
    options: Mapping[str, object] | None = None,
) -> nn.Module:
    """Return a net with random weights. Whether it accepts images of this size, `check_shapes` finds out.

    Args:
        net: a key of `NETS`, a torchvision net, a timm net with the prefix "timm/", or a builder, or the import path of
            one.
        channels: channels of the images.
        image_size: side of square images, or (height, width), in pixels.
        num_classes: number of logits.
        width: multiplier of the hidden widths of our own nets.
        options: values of the net's own options.

    Raises:
        UsageError: for an unknown name or option, or invalid values.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else (image_size[0], image_size[1])
    options, name = dict(options or {}), part_name(net)
    build = check_net(net, options)
    settings = {"channels": channels, "image_size": size, "num_classes": num_classes, "width": width, **options}
    if width == 1 and is_own(name):
        del settings["width"]  # a width of the user's net may mean something else, and has a default of its own
    if width != 1 and "width" not in accepted_arguments(build, settings):
        raise UsageError(f"{name} takes no width: leave model.width at 1")
    built: nn.Module = build_part(build, nn.Module, **settings)
    return built


def is_own(name: str) -> bool:
    """Return whether a net is the user's, by its name, import path or qualified class."""
    return "." in name and not name.startswith(("timm", "torchvision.", "cifar_lit."))


def lay_out(net: nn.Module, name: str) -> None:
    """Set the memory format of a net's weights and maps.

    channels_last is faster on CPUs and tensor cores. The user's own nets compute on contiguous images with contiguous
    weights, as in plain torch, so that `view` works in them.
    """
    if is_own(name):
        net.register_forward_pre_hook(_contiguous)
        return
    for parameter in net.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _contiguous(net: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].contiguous(), *inputs[1:])


def check_net(net: str | Builder, options: Mapping[str, object]) -> Builder:
    """Return the builder of a net. Raise UsageError for an unknown name or option."""
    name, build = part_name(net), find_builder(net)
    parameters = inspect.signature(build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return build  # it accepts any option
    names = [parameter for parameter in parameters if parameter not in ARGUMENTS]
    for option in options:
        if option not in names:
            valid = ", ".join(names) or "none: leave model.net_options out"
            raise UsageError(f"model.net_options of {name} has no {option!r}.{nearest(option, names)} It has {valid}.")
    return build


def find_builder(net: str | Builder) -> Builder:
    """Return the builder of a net. Raise UsageError for an unknown name."""
    name = part_name(net)
    if name in NETS:  # checked first, because torchvision is slow to import
        target: Any = NETS[name]
        if isinstance(target, str):
            target = resolve_name(target)
        return cast("Builder", target)
    if name.startswith("timm/"):
        from cifar_lit.models import pretrained

        pretrained.timm_name(name)  # raises UsageError for an unknown net
        return partial(pretrained.build_timm_net, name)
    if not isinstance(net, str) or is_import_path(net):
        return cast("Builder", find_part(net))
    from torchvision import models

    from cifar_lit.models.torchvision_nets import build_torchvision_net

    names = [*NETS, *models.list_models(module=models)]
    if name not in names:
        check_no_file(name)
        others = "those of torchvision, timm/NAME, and the nets of your own files, as FILE.NAME"
        raise UsageError(f"There is no net named {name!r}.{nearest(name, names)} Nets: {', '.join(NETS)}, {others}.")
    return partial(build_torchvision_net, name)


def check_shapes(net: nn.Module, name: str, input_shape: Sequence[int], num_classes: int) -> None:
    """Raise UsageError unless `net` maps images (B, *input_shape) to logits (B, num_classes).

    Two images of noise pass through the net in evaluation mode. Weights, buffers, modes and the CPU's random state do
    not change. A net that returns probabilities gets a note.
    """
    weight = next(net.parameters(), None)
    if weight is None:
        remedy = "make its layers attributes, and a list of layers an nn.ModuleList"
        raise UsageError(f"{name} has no parameters to train: {remedy}")
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = net(weight.new_empty(2, *input_shape).normal_())
    except Exception as error:
        if _NEEDS_GPU.search(str(error)):
            return  # the net only has GPU kernels, and is still on the CPU
        shape = f"{'×'.join(map(str, input_shape))} (channels, height, width)"
        remedy = "Choose another --net, or larger images."
        if is_own(name):
            remedy = "Build the net for its arguments channels and image_size."
        raise UsageError(f"{name} cannot take images of {shape}: {first_line(error).rstrip('.')}. {remedy}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not isinstance(output, Tensor):
        raise UsageError(
            f"{name} returns a {type(output).__name__}: return the logits alone, a tensor (images, classes)"
        )
    if output.shape != (2, num_classes):
        remedy = f"the data have {num_classes} classes, so its last layer must have num_classes outputs"
        if output.shape[:1] != (2,):
            remedy = "flatten by x.flatten(1) instead of x.view(-1, …), and build its layers for image_size"
        raise UsageError(
            f"{name} returns a tensor of shape {tuple(output.shape)} for 2 images, not (2, {num_classes}): {remedy}"
        )
    if is_own(name) and output.min() >= 0 and torch.allclose(output.sum(1), torch.ones(2).to(output), atol=1e-3):
        remedy = "remove the softmax at its end, because the loss, the scores and classify apply one to its logits"
        note_once(f"{name} returns probabilities: {remedy}")


_NEEDS_GPU = re.compile("cuda|gpu|triton|device", re.IGNORECASE)


def with_versions(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Attach the `_metadata` of `net` (the versions of its modules) to tensors loaded from a file."""
    state = OrderedDict(tensors)
    state._metadata = net.state_dict()._metadata  # type: ignore[attr-defined]
    return state
