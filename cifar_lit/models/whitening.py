"""Filters that whiten the patches of images: uncorrelated outputs of equal strength, before anything is learned."""

from __future__ import annotations

import torch
from torch import Tensor

# airbench's: without it, directions in which patches hardly differ would be blown up to noise.
EPS = 5e-4
BLOCK = 2**23  # numbers in the patches of images that are summed at once: 64 MiB in float64


@torch.no_grad()
def whitening_filters(images: Tensor, patch: int, eps: float = EPS) -> Tensor:
    """Filters (2·C·patch², C, patch, patch) that whiten patches of `images`: C·patch² of them, then the same negated.

    images: float (N, C, height, width), N ≥ 1, normalised. patch: side in pixels; the patches are those at every place.

    Their covariance, not centred, is V·diag(e)·Vᵀ; the filters are the columns of V divided by √(e + eps), that of the largest
    e first, so that a narrow layer after them passes on the strongest directions (Coates and Ng 2012; as in airbench).

    Summed in float64 on the images' device and decomposed on the CPU, which is faster for so small a matrix; returned in the
    images' dtype on their device. An eigenvector's sign is free: here its first component is positive, leaving out those
    that are zero but for rounding, so that the same images give the same filters again.
    """
    _, channels, height, width = images.shape
    size, places = channels * patch**2, (height - patch + 1) * (width - patch + 1)
    blocks = images.split(max(1, BLOCK // (size * places)))
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
