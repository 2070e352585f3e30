"""timm's nets by name, and how the pretraining of a net of timm's or torchvision's prepared its images.

timm is an extra: `pip install "cifar-lit[finetune]"`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.errors import UsageError, first_line, nearest
from cifar_lit.models.torchvision_nets import FIXED_SIZE, INCEPTIONS, takes

TIMM = "timm/"  # begins the names of timm's nets
EXTRA = 'pip install "cifar-lit[finetune]"'
MAX_SIDE = 2048  # pixels, as of the images that are given
SIDE_STEP = 32  # pixels: most nets halve their images five times
OPTIONS = ("side", "drop_rate", "drop_path_rate")  # of timm's nets


class Preprocessing(NamedTuple):
    """How a net's pretraining prepared its images: mean and std of the channels in [0, 1] units.

    image_size: (height, width) at which whole images show things as large as the pretraining's test did, which cut its images
    out of the middle of larger ones: for 224 from 256, it is 256. Nets that take one size have that.
    """

    mean: list[float]
    std: list[float]
    image_size: tuple[int, int]


def import_timm() -> Any:
    """The package; raises UsageError where it is not installed."""
    if find_spec("timm") is None:
        raise UsageError(f"this net is timm's, which is not installed: {EXTRA}")
    return import_module("timm")


def timm_name(name: str) -> str:
    """The name as timm knows it; raises UsageError for one that it does not, and never looks into a network for it."""
    timm, short = import_timm(), name.removeprefix(TIMM)
    if not timm.is_model(short):
        hint = nearest(short, timm.list_models())
        raise UsageError(f"timm has no net named {short!r}.{hint.replace('mean ', f'mean {TIMM}')}")
    try:
        timm.get_pretrained_cfg(short)
    except RuntimeError:
        tags = timm.list_pretrained(f"{short.partition('.')[0]}.*")
        raise UsageError(
            f"timm has no weights named {short!r}: there are {', '.join(tags) or 'none for this net'}"
        ) from None
    return short


def build_timm_net(
    name: str,
    *,
    channels: int,
    image_size: tuple[int, int],
    num_classes: int,
    width: float,
    side: int | None = None,
    **options: float,
) -> nn.Module:
    """timm's net `name` (with "timm/" before it) with random weights and a head of its own for `num_classes`.

    Args:
        side: pixels that the shorter side of images is scaled to within the net, for images that are smaller than those of its
            pretraining; None for as they are.
        **options: drop_rate, drop_path_rate: of dropout before the head, and of whole residual branches.

    Raises UsageError where timm is not installed, has no such net, or the net cannot take images of that size.
    """
    if width != 1:
        raise UsageError(f"{name} has a width of its own: leave width at 1")
    if side is not None and not (type(side) is int and min(image_size) <= side <= MAX_SIDE):
        raise UsageError(
            f"model.net_options.side is {side!r}, not a number of pixels from {min(image_size)} to {MAX_SIDE}"
        )
    timm, short = import_timm(), timm_name(name)
    size = scaled_size(image_size, side) if side else image_size
    cfg = timm.get_pretrained_cfg(short)
    fixed: dict[str, Any] = {"img_size": size} if cfg is not None and cfg.fixed_input_size else {}
    try:
        net: nn.Module = timm.create_model(short, num_classes=num_classes, in_chans=channels, **fixed, **options)
        if not takes(net, channels, size):
            raise UsageError(f"{name} cannot take {size[0]}×{size[1]} images: try {cfg.input_size[1] if cfg else 224}")
    except UsageError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UsageError(f"{name} cannot be built for {size[0]}×{size[1]} images: {first_line(error)}") from None
    if side:
        net.register_forward_pre_hook(Upscaling(size))
    return net


def takes_any_size(name: str) -> bool:
    """Whether a net of timm's that was built for one size takes images of others too."""
    cfg = import_timm().get_pretrained_cfg(timm_name(name))
    return not (cfg is not None and cfg.fixed_input_size)


def scaled_size(image_size: tuple[int, int], side: int) -> tuple[int, int]:
    """(height, width) scaled so that the shorter one is `side`."""
    height, width = (round(side * length / min(image_size)) for length in image_size)
    return height, width


class Upscaling:
    """A hook that scales a net's images, float (B, C, H, W), to a size before it sees them."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """The images in their new size."""
        return F.interpolate(inputs[0], self.size, mode="bilinear", align_corners=False)


def preprocessing(net: str) -> Preprocessing | None:
    """That of a net of timm's or torchvision's, by name; None of others."""
    if net.startswith(TIMM):
        cfg = import_timm().get_pretrained_cfg(timm_name(net))
        if cfg is None:
            return None
        side = cfg.input_size[1]
        if not cfg.fixed_input_size:
            side = max(side, round(side / (cfg.crop_pct or 1) / SIDE_STEP) * SIDE_STEP)
        return Preprocessing(list(cfg.mean), list(cfg.std), (side, side))
    if "." in net:
        return None
    from torchvision import models

    if net not in models.list_models(module=models):
        return None
    transform = models.get_model_weights(net).DEFAULT.transforms()
    mean, std = list(transform.mean), list(transform.std)
    if net in INCEPTIONS:  # built from published weights, they change ImageNet's mean and std to these within
        mean = std = [0.5] * 3
    side = (transform.crop_size if net.startswith(FIXED_SIZE) else transform.resize_size)[0]
    return Preprocessing(mean, std, (side, side))
