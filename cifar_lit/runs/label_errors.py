"""Images to look at again: labels that a net rejects, and test images that training images repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.figures import GALLERY_SIZE, Picture, data_uri

TESTS_AT_ONCE = 256  # compared with all training images


class Pair(NamedTuple):
    """A test image beside the training image that is like it."""

    test: Picture
    train: Picture
    lines: Sequence[str]


class Findings(NamedTuple):
    """What a look at the training images found.

    suspects: those whose label the net is most against, of `rejected` in all, of which confident learning counts `confident`.
    pairs: the test images most like a training image. twins: test images that are one, pixel by pixel; contrary: of other label.
    """

    train_images: int
    test_images: int
    suspects: Sequence[Picture]
    rejected: int
    confident: int
    pairs: Sequence[Pair]
    twins: int
    contrary: int


def nearest_embeddings(train: Tensor, test: Tensor, advance: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """For each test image the cosine with the training image that is nearest by embedding, and that image's row: (tests,) each.

    The mean of the training images is taken off first, as all that a net's embeddings have in common would make any two alike.
    As B. Barz and J. Denzler looked for the duplicates in CIFAR (Do We Train on Test Data?, J. Imaging 2020).

    train, test: embeddings (N, features) of one net. advance: is told how many further test images were looked at.
    """
    middle = train.mean(0)
    known = F.normalize(train - middle, dim=1).T
    nearest = []
    for part in test.split(TESTS_AT_ONCE):
        nearest.append((F.normalize(part - middle, dim=1) @ known).max(1))
        advance(len(part))
    return torch.cat([best for best, _ in nearest]), torch.cat([rows for _, rows in nearest])


def inspect_labels(
    train: ImageSet, test: ImageSet, held_out: set[int], probabilities: Tensor, nearest: tuple[Tensor, Tensor]
) -> Findings:
    """Suspected labels among the training images, and what the test images repeat of them.

    Suspected are those of which another class is likelier than the label, by how far it outweighs the label. Confident learning
    counts those whose likelier class has at least the mean probability that the images of that label have for it (C. Northcutt,
    L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR 70, 2021). It asks for
    probabilities from a net that has not seen the label; from one that was trained on it, many errors stay hidden.

    held_out: rows of the training images that were validated on. probabilities: (N, classes) of the training images.
    nearest: what `nearest_embeddings` gives.
    """
    labels, classes = train.labels, probabilities.shape[1]
    own = probabilities.gather(1, labels[:, None])[:, 0]
    best, suggested = probabilities.max(1)
    means = torch.bincount(labels, own.double(), minlength=classes) / torch.bincount(labels, minlength=classes)
    rejected = (best > own).nonzero()[:, 0]
    confident = int((best >= means[suggested])[rejected].sum())  # none for a class without images, which has no mean
    suspects = []
    for row in rejected[(own - best)[rejected].argsort(stable=True)][:GALLERY_SIZE].tolist():
        label, other, of_label, of_other = train.classes[labels[row]], train.classes[suggested[row]], own[row], best[row]
        alt = f"Training image {row}: labelled {label} with probability {of_label:.2f}, taken for {other} with {of_other:.2f}"
        lines = (f"label {label} {of_label:.3f}", f"said {other} {of_other:.3f}", f"no. {row}{' · held out' * (row in held_out)}")
        suspects.append(Picture(data_uri(train.images[row]), alt, lines))

    first = {_digest(image): row for row, image in reversed(list(enumerate(train.images)))}
    twins = torch.tensor([first.get(_digest(image), -1) for image in test.images])
    repeated, (cosines, rows) = twins >= 0, nearest
    others = min(int((~repeated).sum()), GALLERY_SIZE)
    pairs = []
    for place in cosines.masked_fill(repeated, -2.0).argsort(descending=True, stable=True)[:others]:
        row = rows[place]
        image, other_image = test.images[place].float(), train.images[row].float()
        difference = min(float((image - side).square().mean().sqrt()) for side in (other_image, other_image.flip(1)))
        likeness = (f"cosine {float(cosines[place]):.4f}", f"difference {difference:.1f}")
        pairs.append(Pair(_labelled("Test", test, int(place)), _labelled("Training", train, int(row)), likeness))
    contrary = int((labels[twins[repeated]] != test.labels[repeated]).sum())
    return Findings(len(train), len(test), suspects, len(rejected), confident, pairs, int(repeated.sum()), contrary)


def _digest(image: Tensor) -> bytes:
    return sha256(image.numpy().tobytes()).digest()


def _labelled(what: str, images: ImageSet, row: int) -> Picture:
    label = images.classes[images.labels[row]]
    return Picture(data_uri(images.images[row]), f"{what} image {row}: {label}", (f"{what[:5].lower()} {row}", label))
