"""Images to look at again: labels that a net rejects, and test images that training images repeat."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Suspects(NamedTuple):
    """Images whose label a net rejects.

    rows: which of the set, int64 (M,), what the net is most against first. suggested: the class that each is taken for, int64
    (M,). label_probability, suggested_probability: of the label and of that class, (M,). counted: bool (M,), whether
    confident learning counts it as mislabelled.
    """

    rows: Tensor
    suggested: Tensor
    label_probability: Tensor
    suggested_probability: Tensor
    counted: Tensor


def suspected_labels(probabilities: Tensor, labels: Tensor) -> Suspects:
    """The images of which another class is likelier than the label, by how far it outweighs the label.

    probabilities: float (N, classes). labels: int64 (N,).
    Confident learning counts those whose likelier class has at least the mean probability that the images of that label have
    for it, and ranks them likewise (C. Northcutt, L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in
    Dataset Labels, JAIR 70, 2021). It asks for probabilities from a net that has not seen the label (cross-validation): from
    one that was trained on it, many errors stay hidden.
    """
    classes = probabilities.shape[1]
    own = probabilities.gather(1, labels[:, None])[:, 0]
    best, suggested = probabilities.max(1)
    thresholds = torch.bincount(labels, own.double(), minlength=classes) / torch.bincount(labels, minlength=classes)
    rows = (best > own).nonzero()[:, 0]
    rows = rows[(own[rows] - best[rows]).argsort(stable=True)]
    counted = best[rows] >= thresholds[suggested[rows]]  # false for a class without images, which has no mean
    return Suspects(rows, suggested[rows], own[rows], best[rows], counted)


def exact_twins(train: Tensor, test: Tensor) -> Tensor:
    """For each test image the row of a training image of the same pixels, -1 where there is none: int64 (tests,).

    train, test: uint8 (N, H, W, C).
    """
    rows = {_hash(image): row for row, image in reversed(list(enumerate(train)))}
    return torch.tensor([rows.get(_hash(image), -1) for image in test], dtype=torch.int64)


def _hash(image: Tensor) -> bytes:
    return blake2b(image.numpy().tobytes(), digest_size=16).digest()


def nearest_embedding(
    train: Tensor, test: Tensor, block: int = 256, advance: Callable[[int], None] = lambda count: None
) -> tuple[Tensor, Tensor]:
    """For each test image the cosine with the training image nearest_embedding by embedding, and that image's row: (tests,) each.

    train, test: embeddings (N, features) of one net; the mean of the training images is taken off both first, as all that
    a net's embeddings have in common would make any two alike. As B. Barz and J. Denzler looked for the duplicates in CIFAR
    (Do We Train on Test Data?, J. Imaging 2020). Looks at `block` test images at a time, and tells `advance` so.
    """
    middle = train.mean(0)
    ours = F.normalize(train - middle, dim=1).T
    best, rows = [], []
    for part in test.split(block):
        cosines, places = (F.normalize(part - middle, dim=1) @ ours).max(1)
        best.append(cosines)
        rows.append(places)
        advance(len(part))
    return torch.cat(best), torch.cat(rows)


def pixel_difference(first: Tensor, second: Tensor) -> float:
    """The root mean square difference of two images uint8 (H, W, C) in 0 … 255: as they are, or mirrored where that is less."""
    ours = first.float()
    return min(float((ours - other.float()).square().mean().sqrt()) for other in (second, second.flip(1)))
