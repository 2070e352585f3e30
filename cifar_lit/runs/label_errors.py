"""Images to look at again: labels that a net rejects, and test images that training images repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.charts import GALLERY_SIZE, Picture, data_uri

TESTS_AT_ONCE = 256  # compared with all training images


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

    Confident learning counts those whose likelier class has at least the mean probability that the images of that label have
    for it, and ranks them likewise (C. Northcutt, L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in
    Dataset Labels, JAIR 70, 2021). It asks for probabilities from a net that has not seen the label (cross-validation): from
    one that was trained on it, many errors stay hidden.

    Args:
        probabilities: Float (N, classes).
        labels: int64 (N,).
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
    """For each test image the row of the first training image of the same pixels, -1 where there is none: int64 (tests,).

    train, test: uint8 (N, H, W, C).
    """
    rows = {_hash(image): row for row, image in reversed(list(enumerate(train)))}
    return torch.tensor([rows.get(_hash(image), -1) for image in test], dtype=torch.int64)


def _hash(image: Tensor) -> bytes:
    return blake2b(image.numpy().tobytes(), digest_size=16).digest()


def nearest_embeddings(train: Tensor, test: Tensor, advance: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """For each test image the cosine with the training image that is nearest by embedding, and that image's row: (tests,) each.

    The mean of the training images is taken off first, as all that a net's embeddings have in common would make any two alike.
    As B. Barz and J. Denzler looked for the duplicates in CIFAR (Do We Train on Test Data?, J. Imaging 2020).

    Args:
        train: Embeddings (N, features) of one net; `test` likewise.
        advance: Is told how many further test images were looked at.
    """
    middle = train.mean(0)
    known = F.normalize(train - middle, dim=1).T
    cosines, rows = [], []
    for part in test.split(TESTS_AT_ONCE):
        best, places = (F.normalize(part - middle, dim=1) @ known).max(1)
        cosines.append(best)
        rows.append(places)
        advance(len(part))
    return torch.cat(cosines), torch.cat(rows)


def pixel_difference(first: Tensor, second: Tensor) -> float:
    """The root mean square difference of two images uint8 (H, W, C) in 0 … 255: as they are, or mirrored where that is less."""
    image = first.float()
    return min(float((image - other.float()).square().mean().sqrt()) for other in (second, second.flip(1)))


# ---- The same as pictures of a page.


class Pair(NamedTuple):
    """A test image beside the training image that is like it."""

    test: Picture
    train: Picture
    lines: Sequence[str]


@dataclass(frozen=True)
class Findings:
    """What a look at the training images found.

    train_images, test_images: how many were looked at. suspects: the training images whose label the net is most against, of
    `rejected` in all; confident: how many of these confident learning counts. pairs: the test
    images most like a training image. twins: test images that are a training image, pixel by pixel; contrary: those of
    them with another label there.
    """

    train_images: int
    test_images: int
    suspects: Sequence[Picture]
    rejected: int
    confident: int
    pairs: Sequence[Pair]
    twins: int
    contrary: int


def inspect_labels(
    train: ImageSet, test: ImageSet, held_out: set[int], probabilities: Tensor, nearest: tuple[Tensor, Tensor]
) -> Findings:
    """Suspected labels among the training images, and what the test images repeat of them.

    Args:
        held_out: Rows of the training images that were validated on.
        probabilities: (N, classes) of the training images.
        nearest: What `nearest_embeddings` gives.
    """
    suspects = suspected_labels(probabilities, train.labels)
    twins = exact_twins(train.images, test.images)
    repeated = twins >= 0
    cosines, rows = nearest
    ranked = cosines.masked_fill(repeated, -2.0).argsort(descending=True, stable=True)[: int((~repeated).sum())]
    return Findings(
        train_images=len(train),
        test_images=len(test),
        suspects=_suspect_pictures(train, suspects, held_out),
        rejected=len(suspects.rows),
        confident=int(suspects.counted.sum()),
        pairs=[_pair(train, test, int(rows[place]), place, float(cosines[place])) for place in ranked[:GALLERY_SIZE].tolist()],
        twins=int(repeated.sum()),
        contrary=int((train.labels[twins[repeated]] != test.labels[repeated]).sum()),
    )


def _suspect_pictures(train: ImageSet, suspects: Suspects, held_out: set[int]) -> list[Picture]:
    pictures = []
    for row, other, own, best in zip(*(values[:GALLERY_SIZE].tolist() for values in suspects[:4]), strict=True):
        label, suggested = train.classes[int(train.labels[row])], train.classes[other]
        alt = f"Training image {row}: labelled {label} with probability {own:.2f}, taken for {suggested} with {best:.2f}"
        lines = (f"label {label} {own:.3f}", f"said {suggested} {best:.3f}", f"no. {row}{' · held out' * (row in held_out)}")
        pictures.append(Picture(data_uri(train.images[row]), alt, lines))
    return pictures


def _pair(train: ImageSet, test: ImageSet, row: int, place: int, cosine: float) -> Pair:
    difference = pixel_difference(test.images[place], train.images[row])
    lines = (f"cosine {cosine:.4f}", f"difference {difference:.1f}")
    return Pair(_side("Test", test, place), _side("Training", train, row), lines)


def _side(what: str, images: ImageSet, number: int) -> Picture:
    label = images.classes[int(images.labels[number])]
    lines = (f"{what[:5].rstrip().lower()} {number}", label)
    return Picture(data_uri(images.images[number]), f"{what} image {number}: {label}", lines)
