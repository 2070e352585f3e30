"""timm's nets, and the image preprocessing of pretrained nets.

timm is an optional dependency: `pip install -e ".[finetune]"`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError, install_command, nearest
from cifar_lit.models.torchvision_nets import FIXED_SIZE, INCEPTIONS

TIMM = "timm/"  # prefix of the names of timm's nets
EXTRA = install_command("finetune")
SIDE_STEP = 32  # pixels: most nets halve their images five times


class Pretraining(NamedTuple):
    """Preprocessing of the images on which a net was pretrained.

    Args:
        mean, std: of the channels, for pixels in 0 … 1.
        image_size: (height, width) in pixels of whole images, at the scale of the pretraining's test. A test on central
            crops of 224 from 256 pixels gives 256. A net with a fixed input size gives that size.
    """

    mean: list[float]
    std: list[float]
    image_size: tuple[int, int]


def import_timm() -> Any:
    """Return the package timm. Raise UsageError if it is not installed."""
    if find_spec("timm") is None:
        raise UsageError(f"this net needs timm, which is not installed: {EXTRA}")
    return import_module("timm")


def timm_name(name: str) -> str:
    """Return the name without the prefix "timm/". Raise UsageError if timm has no such net; works offline."""
    timm, short = import_timm(), name.removeprefix(TIMM)
    if not timm.is_model(short):
        hint = nearest(short, timm.list_models())
        raise UsageError(f"timm has no net named {short!r}.{hint.replace('mean ', f'mean {TIMM}')}")
    return short


def build_timm_net(
    name: str,
    *,
    channels: int,
    image_size: tuple[int, int],
    num_classes: int,
    side: int | None = None,
) -> nn.Module:
    """Return the timm net `name`, which has the prefix "timm/", with random weights; see `registry.build_net`.

    Args:
        side: the net first scales images so that their shorter side has this many pixels; None for no scaling.

    Raises:
        UsageError: if timm is not installed or has no such net.
    """
    timm = import_timm()
    short = timm_name(name)
    size = image_size
    if side:
        size = (round(side * size[0] / min(image_size)), round(side * size[1] / min(image_size)))
    cfg = timm.get_pretrained_cfg(short)
    settings: dict[str, Any] = {}
    if getattr(cfg, "fixed_input_size", False):
        settings["img_size"] = size
    net: nn.Module = timm.create_model(
        short,
        num_classes=num_classes,
        in_chans=channels,
        **settings,
    )
    if side:
        net.register_forward_pre_hook(partial(_scale, size=size))
    return net


def _scale(net: nn.Module, inputs: tuple[Tensor, ...], size: tuple[int, int]) -> Tensor:
    return F.interpolate(inputs[0], size, mode="bilinear", align_corners=False)


def pretraining_of(net: str) -> Pretraining | None:
    """Return the preprocessing of a timm or torchvision net by name, None for other nets."""
    if net.startswith(TIMM):
        cfg = import_timm().get_pretrained_cfg(timm_name(net))
        if cfg is None:
            return None
        side = cfg.input_size[1]
        if not cfg.fixed_input_size:
            side = max(side, round(side / cfg.crop_pct / SIDE_STEP) * SIDE_STEP)
        return Pretraining(list(cfg.mean), list(cfg.std), (side, side))
    if "." in net:
        return None
    from torchvision import models

    if net not in models.list_models(module=models):
        return None
    transform = models.get_model_weights(net).DEFAULT.transforms()
    mean, std = list(transform.mean), list(transform.std)
    if net in INCEPTIONS:  # torchvision builds a conversion from ImageNet's mean and std into the pretrained net
        mean = std = [0.5] * 3
    side = (transform.crop_size if net.startswith(FIXED_SIZE) else transform.resize_size)[0]
    return Pretraining(mean, std, (side, side))
