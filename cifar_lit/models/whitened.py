"""`whitened`: the net of the CIFAR speed records, with configurable widths and depths.

The first layer is computed from the training images. The layout is that of airbench (K. Jordan, 2024), which follows D.
Page and T. Balsam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError, check_choice
from cifar_lit.models.fast_gradients import autocast_dtype
from cifar_lit.models.tutorial_nets import scaled

EPS = 5e-4  # airbench's value; limits the amplification of directions with little variance
BLOCK_NUMBERS = 2**23  # numbers per block of patches: 64 MiB in float64


@torch.no_grad()
def whitening_filters(images: Tensor, patch: int) -> Tensor:
    """Return C·patch² filters that whiten the patches of `images`, followed by the negated filters.

    The uncentred covariance of the patches, computed in float64, is V·diag(e)·Vᵀ. The filters are the columns of V
    divided by √(e + EPS) (Coates and Ng, 2012; as in airbench). They are in descending order of e, so that a narrow
    next layer receives the strongest directions. The first non-zero component of each eigenvector is positive.

    Args:
        images: float (N, C, height, width), N ≥ 1, normalised.
        patch: side of the patches in pixels.

    Returns:
        (2·C·patch², C, patch, patch), with dtype and device of the images.
    """
    _, channels, height, width = images.shape
    size = channels * patch**2
    positions = (height - patch + 1) * (width - patch + 1)
    blocks = images.split(max(1, BLOCK_NUMBERS // (size * positions)))
    total = torch.stack([_summed_products(block, patch) for block in blocks]).sum(0).cpu()
    values, vectors = torch.linalg.eigh(total / (len(images) * positions))  # in ascending order
    values, vectors = values.flip(0), vectors.flip(1)
    magnitudes = vectors.abs()
    first = (magnitudes > 1e-3 * magnitudes.amax(0)).byte().argmax(0, keepdim=True)
    signs = vectors.gather(0, first).sign()
    filters = (vectors * signs / (values + EPS).sqrt()).T.reshape(size, channels, patch, patch)
    return torch.cat((filters, -filters)).type_as(images)


def _summed_products(images: Tensor, patch: int) -> Tensor:
    """Return the sum of p·pᵀ over all patches p of images (n, C, height, width): float64 (C·patch², C·patch²)."""
    try:
        doubles = images.double()
    except TypeError:  # MPS does not support float64
        doubles = images.cpu().double()
    # F.unfold would launch one kernel per image on a GPU.
    patches = doubles.unfold(2, patch, 1).unfold(3, patch, 1).permute(0, 1, 4, 5, 2, 3)
    patches = patches.reshape(len(images), images.shape[1] * patch**2, -1)
    return torch.bmm(patches, patches.mT).sum(0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}
PATCH = 2  # side of the whitened patches in pixels; the first layer has 2 · channels · PATCH² filters
NORM_EPS = 1e-12  # airbench's value; only avoids a division by 0
NORM_MOMENTUM = 0.4  # weight of the current batch in the running statistics of the norms


class WhitenedNet(nn.Module):
    """Whitening convolution, groups of convolutions, global pooling, linear head without bias.

    Maps float images (B, channels, height, width) of any size for which a pixel remains after the last group to float
    logits (B, num_classes). The first and the last layer ignore autocast: the whitening filters span orders of
    magnitude, and bfloat16 logits would tie.

    Args:
        channels, image_size, num_classes, width: see `registry.build_net`.
        widths: channels of each group of convolutions. Each group halves the resolution.
        depth: number of 3×3 convolutions per group, one number for all groups or a list with an entry for each. An
            entry can also be a list of kernel sides, such as [2, 3, 1]. Only the first side may be even. An even side
            shrinks the feature maps by a pixel.
        residual: in each group, add the output of the first convolution before the last activation.
        inner: for each group, channels of the convolutions between its first and its last. None: the group's width.
        whiten_bias: train the bias of the first layer. With false, no gradient is computed at full resolution, which
            saves a tenth of the time on a CPU.
        activation: gelu or silu.

    Attributes:
        whitened: whether `initialise` was called; a bool scalar, saved with the weights.
        is_prepared: whether the first layer is, or will be, computed from images.
        bias_is_final: whether the whitening bias is no longer trained, so that no gradient is computed at full
            resolution.
    """

    whitened: Tensor
    bias_is_final = False
    is_prepared = False

    def __init__(
        self,
        *,
        channels: int,
        image_size: tuple[int, int],
        num_classes: int,
        width: float,
        widths: Sequence[int] = (64, 256, 256),
        depth: int | list[int | list[int]] = 2,
        residual: bool = False,
        inner: list[int] | None = None,
        whiten_bias: bool = True,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        check_choice("model.net_options.activation", activation, ACTIVATIONS)
        for name, values in (("depth", depth), ("inner", inner)):
            if isinstance(values, list) and len(values) != len(widths):
                raise UsageError(f"model.net_options.{name} needs one entry per group, as widths: {len(widths)}")
        depths = depth if isinstance(depth, list) else [depth] * len(widths)
        kernels = [sides if isinstance(sides, list) else [3] * sides for sides in depths]
        filters = 2 * channels * PATCH**2
        self.whiten = nn.Conv2d(channels, filters, PATCH)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(cast("Tensor", self.whiten.bias)).requires_grad_(whiten_bias)
        self.register_buffer("whitened", torch.tensor(False))
        self.activation = ACTIVATIONS[activation]
        inner = [scaled(units, width) for units in inner or widths]
        widths = [scaled(units, width) for units in widths]
        groups = zip([filters, *widths], widths, inner, kernels, strict=False)
        self.groups = nn.Sequential(*(Group(*group, activation, residual) for group in groups))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        # airbench's recipe for Muon: weights of standard deviation 1, and logits scaled by the width.
        self.logit_scale = 1 / widths[-1]
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of normalised images."""
        if self.training and not self.is_prepared and not torch.compiler.is_compiling():
            self._check_whitened(images)
        with _no_autocast(images):
            maps = self.whiten(images.type(self.whiten.weight.dtype))
        maps = maps.detach() if self.bias_is_final else maps
        # The activation at full resolution moves half the memory in the dtype of autocast.
        maps = self.groups(self.activation(maps.type(autocast_dtype(maps))))
        pooled = F.max_pool2d(maps, maps.shape[2:])
        with _no_autocast(images):
            logits: Tensor = self.head(pooled.flatten(1).type(self.head.weight.dtype))
            return logits * self.logit_scale

    def _check_whitened(self, images: Tensor) -> None:
        """Raise UsageError if the net is trained without its first layer."""
        if not images.is_meta and not bool(self.whitened):
            raise UsageError("the first layer of this net is not computed: add the feature whitening (whitening: {})")
        self.is_prepared = True

    @torch.no_grad()
    def initialise(self, images: Tensor) -> None:
        """Compute the first layer's filters from normalised float images (N, channels, height, width)."""
        self.whiten.weight.copy_(whitening_filters(images, PATCH))
        self.whitened.fill_(True)


class Group(nn.Module):
    """Convolution, 2×2 max pooling, norm, activation; then convolution, norm, activation for each further convolution.

    Maps (B, inputs, height, width) to (B, outputs, height // 2, width // 2). Convolutions start as the identity on
    their first channels and with torch's default on the remaining ones. The scale of the norms is fixed at 1.
    """

    def __init__(
        self, inputs: int, outputs: int, inner: int, kernels: list[int], activation: str, residual: bool
    ) -> None:
        super().__init__()
        depth = len(kernels)
        sources = [inputs, outputs, *[inner] * (depth - 2)][:depth]
        shapes = list(zip(sources, [*sources[1:], outputs], kernels, strict=True))
        self.convs = nn.ModuleList(nn.Conv2d(*shape, padding=(shape[2] - 1) // 2, bias=False) for shape in shapes)
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(units, eps=NORM_EPS, momentum=NORM_MOMENTUM) for _, units, _ in shapes
        )
        self.activation = ACTIVATIONS[activation]
        self.residual = residual
        for conv, norm, source in zip(self.convs, self.norms, sources, strict=True):
            nn.init.dirac_(conv.weight.data[:source])  # type: ignore[index]
            norm.weight.requires_grad_(False)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the feature maps."""
        maps = F.max_pool2d(self.convs[0](maps), 2)
        first = maps = self.activation(self.norms[0](maps))
        for index in range(1, len(self.convs)):
            maps = self.norms[index](self.convs[index](maps))
            if self.residual and index == len(self.convs) - 1:
                maps = maps + first
            maps = self.activation(maps)
        return maps


def _no_autocast(images: Tensor) -> AbstractContextManager[Any]:
    kind = images.device.type
    # torch.compile of torch 2.11 cannot trace `is_autocast_available`.
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
