"""`whitened`: the net of the CIFAR speed records, at any widths and depths, with a first layer computed from the images.

The layout is that of K. Jordan's airbench (2024) and of D. Page's and T. Balsam's nets before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.errors import UsageError, nearest
from cifar_lit.models.tutorial_nets import scaled

EPS = 5e-4  # airbench's: without it, directions in which patches hardly differ would be blown up to noise
BLOCK_NUMBERS = 2**23  # numbers in the patches of images that are summed at once: 64 MiB in float64


@torch.no_grad()
def whitening_filters(images: Tensor, patch: int, eps: float = EPS) -> Tensor:
    """Filters that whiten the patches at every place of `images`: C·patch² of them, then the same negated.

    The covariance of the patches, not centred, is V·diag(e)·Vᵀ, summed in float64; the filters are the columns of V divided by
    √(e + eps), that of the largest e first, so that a narrow layer after them passes on the strongest directions (Coates and
    Ng 2012; as in airbench). An eigenvector's sign is free: here its first component that is not zero is positive.

    Args:
        images: float (N, C, height, width), N ≥ 1, normalised.

    Returns:
        (2·C·patch², C, patch, patch) in the images' dtype on their device.
    """
    _, channels, height, width = images.shape
    size, places = channels * patch**2, (height - patch + 1) * (width - patch + 1)
    blocks = images.split(max(1, BLOCK_NUMBERS // (size * places)))
    summed = torch.stack([_summed_products(block, patch) for block in blocks]).sum(0).cpu()
    values, vectors = torch.linalg.eigh(summed / (len(images) * places))  # smallest first
    values, vectors = values.flip(0), vectors.flip(1)
    magnitudes = vectors.abs()
    first = (magnitudes > 1e-3 * magnitudes.amax(0)).byte().argmax(0, keepdim=True)
    signs = vectors.gather(0, first).sign()
    filters = (vectors * signs / (values + eps).sqrt()).T.reshape(size, channels, patch, patch)
    return torch.cat((filters, -filters)).type_as(images)


def _summed_products(images: Tensor, patch: int) -> Tensor:
    """The sum of p·pᵀ over all patches p of images (n, C, height, width): float64 (C·patch², C·patch²)."""
    try:
        exact = images.double()
    except TypeError:  # Apple's GPUs have no float64
        exact = images.cpu().double()
    # unfolded by strides: F.unfold would start one kernel an image on a GPU
    patches = exact.unfold(2, patch, 1).unfold(3, patch, 1).permute(0, 1, 4, 5, 2, 3)
    patches = patches.reshape(len(images), images.shape[1] * patch**2, -1)
    return torch.bmm(patches, patches.mT).sum(0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}
HEAD_POOLS = ("max", "avg")
MAX_DEPTH = 100  # convolutions in a group
MAX_SIDE = 7  # pixels of a kernel
NORM_EPS = 1e-12  # the records': none but for a channel without any variance


@dataclass(frozen=True)
class WhitenedOptions:
    """What `model.net_options` says of a whitened net; raises UsageError for values that cannot be meant.

    widths: channels of each group of convolutions; each group halves the sides of its images.
    depth: 3×3 convolutions in each group, one number for all or a list of one a group. In place of its number a group can have
        the sides of its kernels, such as [2, 3, 1]; an even side, which only the first can have, takes a pixel off the maps.
    residual: in each group, the output of the first convolution is added before the last activation.
    inner: channels between the second and the last convolution of each group, a list of one a group. None: as its width.
    patch: side of the patches that are whitened, in pixels; the first layer has 2 · channels · patch² filters.
    stride: of the first layer; 2 with patches of 4 pixels starts at half the resolution, for a fraction of the time.
    pad_input: give the first layer images with a multiple of four channels, the further ones zero, which a GPU's tensor cores
        take: the same logits, but for rounding.
    whiten_bias: train the bias of the first layer. Without it nothing goes back to full resolution, which on a CPU saves a
        tenth of the time.
    activation: gelu, silu or relu.
    head_pool: what the last group's places are made one by: max or avg.
    norm_momentum: share of a new batch in the norms' running statistics.
    logit_scale: factor of the logits (1/9 in airbench's recipe for SGD). None: one over the last width, and the head's weights
        start with a standard deviation of 1 (its recipe for Muon).
    """

    widths: list[int] = field(default_factory=lambda: [64, 256, 256])
    depth: int | list[int | list[int]] = 2
    residual: bool = False
    inner: list[int] | None = None
    patch: int = 2
    stride: int = 1
    pad_input: bool = False
    whiten_bias: bool = True
    activation: str = "gelu"
    head_pool: str = "max"
    norm_momentum: float = 0.4
    logit_scale: float | None = None

    def __post_init__(self) -> None:
        groups = len(self.widths) if isinstance(self.widths, list) else 0
        depths = self.depth if isinstance(self.depth, list) else [self.depth] * groups
        numbers = [depth for depth in depths if not isinstance(depth, list)]
        deep = len(depths) == groups and all(_is_count(number) and number <= MAX_DEPTH for number in numbers)
        sided = all(_are_sides(depth) for depth in depths if isinstance(depth, list))
        channels = "a list of whole numbers above 0, one a group"
        rules = [
            ("widths", groups and _are_counts(self.widths, groups), channels),
            ("depth", deep, f"a whole number from 1 to {MAX_DEPTH}, or a list of {groups}, one a group"),
            ("depth", sided, f"in its lists sides from 1 to {MAX_SIDE} pixels, odd ones behind the first"),
            ("inner", self.inner is None or _are_counts(self.inner, groups), f"null, or {channels}"),
            ("residual", isinstance(self.residual, bool), "true or false"),
            ("pad_input", isinstance(self.pad_input, bool), "true or false"),
            ("whiten_bias", isinstance(self.whiten_bias, bool), "true or false"),
            ("patch", _is_count(self.patch), "a whole number of pixels above 0"),
            ("stride", _is_count(self.stride) and self.stride <= self.patch, f"from 1 to {self.patch} (patch) pixels"),
            ("activation", self.activation in tuple(ACTIVATIONS), f"one of {', '.join(ACTIVATIONS)}"),
            ("head_pool", self.head_pool in HEAD_POOLS, f"one of {', '.join(HEAD_POOLS)}"),
            ("norm_momentum", _is_positive(self.norm_momentum) and self.norm_momentum <= 1, "above 0 and at most 1"),
            ("logit_scale", self.logit_scale is None or _is_positive(self.logit_scale), "a number above 0, or null"),
        ]
        for name, valid, rule in rules:
            if not valid:
                value = getattr(self, name)
                hint = nearest(str(value), ACTIVATIONS) if name == "activation" else ""
                raise UsageError(f"model.net_options.{name} must be {rule}, not {value!r}.{hint}")
        if self.residual and max(map(len, self.kernels)) == 1:
            raise UsageError(
                "model.net_options.residual goes around the second convolution and those after: set depth above 1"
            )

    @property
    def kernels(self) -> list[list[int]]:
        """The sides of each group's kernels in pixels."""
        depths = self.depth if isinstance(self.depth, list) else [self.depth] * len(self.widths)
        return [depth if isinstance(depth, list) else [3] * depth for depth in depths]

    @property
    def padding(self) -> int:
        """Of the first layer: none for 2×2 patches, as in the records; with a stride, such that sides are divided by it."""
        return (self.patch - 1) // 2 if self.stride == 1 else (self.patch - self.stride + 1) // 2


OPTIONS = tuple(WhitenedOptions.__dataclass_fields__)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_counts(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_count, values))


def _are_sides(sides: list[Any]) -> bool:
    counts = 0 < len(sides) <= MAX_DEPTH and _are_counts(sides, len(sides))
    return counts and max(sides) <= MAX_SIDE and all(side % 2 for side in sides[1:])


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def min_size(**options: Any) -> int:
    """The least height and width of images for a net of these options: a pixel is left after every group's halving."""
    settings, least = WhitenedOptions(**options), 1
    for first, *_ in reversed(settings.kernels):
        least = 2 * least + (first + 1) % 2
    return max(settings.patch, (least - 1) * settings.stride + settings.patch - 2 * settings.padding)


class WhitenedNet(nn.Module):
    """Whitening convolution, groups of convolutions, global pooling, linear head without bias.

    Float images (B, channels, height, width) of any size from `min_size` on to float logits (B, num_classes): both ends compute
    in the weights' precision even under autocast, the whitening because its filters span orders of magnitude, the head because
    bfloat16 would tie classes. The buffer `whitened`, bool (), tells whether `initialise` was called, also of a net that is
    loaded. Arguments as for `build_net`; `options` are `WhitenedOptions`.

    Attributes:
        bias_is_final: the bias of the whitening is trained no more, so that no gradient has to go back to full resolution.
    """

    whitened: Tensor
    bias_is_final = False

    def __init__(
        self, channels: int, image_size: tuple[int, int], num_classes: int, width: float, **options: Any
    ) -> None:
        super().__init__()
        settings = WhitenedOptions(**options)
        filters = 2 * channels * settings.patch**2
        self.whiten = nn.Conv2d(channels, filters, settings.patch, stride=settings.stride, padding=settings.padding)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(cast("Tensor", self.whiten.bias)).requires_grad_(settings.whiten_bias)
        self.register_buffer("whitened", torch.tensor(False))
        self.further_channels = -channels % 4 if settings.pad_input else 0
        self.activation = ACTIVATIONS[settings.activation]
        widths = [scaled(units, width) for units in settings.widths]
        inner = [scaled(units, width) for units in settings.inner or settings.widths]
        groups = zip([filters, *widths], widths, inner, settings.kernels, strict=False)
        self.groups = nn.Sequential(*(Group(*group, settings) for group in groups))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.pool = settings.head_pool
        self.logit_scale = settings.logit_scale or 1 / widths[-1]
        if settings.logit_scale is None:
            with torch.no_grad():
                self.head.weight.div_(self.head.weight.std())

    def forward(self, images: Tensor) -> Tensor:
        """Logits of normalised images."""
        with _no_autocast(images):
            maps = self._whitened(images.type(self.whiten.weight.dtype))
        maps = maps.detach() if self.bias_is_final else maps
        maps = self.groups(self.activation(_rounded_for_autocast(maps)))
        pooled = F.max_pool2d(maps, maps.shape[2:]) if self.pool == "max" else maps.mean((2, 3))
        with _no_autocast(images):
            logits: Tensor = self.head(pooled.flatten(1).type(self.head.weight.dtype))
            return logits * self.logit_scale

    def _whitened(self, images: Tensor) -> Tensor:
        if not self.further_channels:
            return self.whiten(images)
        padded, weight = (
            F.pad(tensor, (0, 0, 0, 0, 0, self.further_channels)) for tensor in (images, self.whiten.weight)
        )
        return F.conv2d(padded, weight, self.whiten.bias, self.whiten.stride, self.whiten.padding)

    @torch.no_grad()
    def initialise(self, images: Tensor) -> None:
        """Computes the first layer's filters from float images (N, channels, height, width): normalised, not augmented."""
        self.whiten.weight.copy_(whitening_filters(images, self.whiten.kernel_size[0]))
        self.whitened.fill_(True)


class Group(nn.Module):
    """Convolution, 2×2 maximum, norm, activation; then convolution, norm, activation for each further convolution.

    (B, inputs, height, width) to (B, outputs, height // 2, width // 2). The convolutions start as the identity on as many
    channels as they can, and with torch's own weights on the others; the norms' scale stays at 1.
    """

    def __init__(self, inputs: int, outputs: int, inner: int, kernels: list[int], options: WhitenedOptions) -> None:
        super().__init__()
        depth = len(kernels)
        sources = [inputs, outputs, *[inner] * (depth - 2)][:depth]
        shapes = list(zip(sources, [*sources[1:], outputs], kernels, strict=True))
        self.convs = nn.ModuleList(nn.Conv2d(*shape, padding=(shape[2] - 1) // 2, bias=False) for shape in shapes)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(units, eps=NORM_EPS, momentum=options.norm_momentum) for _, units, _ in shapes
        )
        self.activation = ACTIVATIONS[options.activation]
        self.residual = options.residual and depth > 1
        for conv, norm, source in zip(self.convs, self.norms, sources, strict=True):
            nn.init.dirac_(conv.weight.data[:source])  # type: ignore[index]
            norm.weight.requires_grad_(False)

    def forward(self, maps: Tensor) -> Tensor:
        """The maps of half the sides, rounded down."""
        maps = F.max_pool2d(self.convs[0](maps), 2)
        first = maps = self.activation(self.norms[0](maps))
        for place in range(1, len(self.convs)):
            maps = self.norms[place](self.convs[place](maps))
            if self.residual and place == len(self.convs) - 1:
                maps = maps + first
            maps = self.activation(maps)
        return maps


def _no_autocast(images: Tensor) -> AbstractContextManager[Any]:
    kind = images.device.type
    # not by `is_autocast_available`, which torch 2.11's compiler cannot trace
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def _rounded_for_autocast(maps: Tensor) -> Tensor:
    """`maps` as autocast hands them on: the activation at full resolution then moves half the memory."""
    kind = maps.device.type
    lower = kind != "meta" and torch.is_autocast_enabled(kind)
    return maps.type(torch.get_autocast_dtype(kind)) if lower else maps
