"""Find likely label errors, and duplicates between training and test images."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.figures import GALLERY_SIZE, Picture, data_uri

AT_ONCE = 256  # images compared with all training images in one step


class Pair(NamedTuple):
    """A test image beside the training image that is like it."""

    test: Picture
    train: Picture
    lines: Sequence[str]


class Suspects(NamedTuple):
    """Labels of a set that are to be looked at.

    pictures: those with the most against the label. rejected: images of which another class is likelier than the label;
    confident: those of them that confident learning counts.
    """

    images: int
    pictures: Sequence[Picture]
    rejected: int
    confident: int


class Findings(NamedTuple):
    """What a look at the training images found.

    pairs: the test images most like a training image. twins: test images that are one, pixel by pixel; contrary: of other label.
    """

    train: Suspects
    test: Suspects
    pairs: Sequence[Pair]
    twins: int
    contrary: int


def find_nearest(known: Tensor, images: Tensor, advance: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """Return for each image the cosine with the nearest known image, and the row of that image.

    The mean of the known images is subtracted first: the common part of a net's embeddings would make any two images
    similar. B. Barz and J. Denzler searched CIFAR for duplicates in this way (Do We Train on Test Data?, J. Imaging 2020).

    Args:
        known, images: embeddings (N, features) of one net.
        advance: callback with the number of images processed since the last call.

    Returns:
        Cosines and int64 rows, both (images,) on the CPU.
    """
    middle = known.mean(0)
    columns = F.normalize(known - middle, dim=1).T
    nearest = []
    for part in images.split(AT_ONCE):
        nearest.append((F.normalize(part - middle, dim=1) @ columns).max(1))
        advance(len(part))
    return torch.cat([cosines for cosines, _ in nearest]).cpu(), torch.cat([rows for _, rows in nearest]).cpu()


def suspect_labels(images: ImageSet, probabilities: Tensor, what: str, held_out: Set[int] = frozenset()) -> Suspects:
    """Return the labels that contradict a net's predictions, the least probable label first.

    A label is suspected if another class is more probable. Confident learning counts the suspected labels whose predicted
    class has at least its threshold: the mean probability of that class among the images labelled with it (C. Northcutt,
    L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR 2021).

    Args:
        images: the images with their labels.
        probabilities: the net's, float (N, classes).
        what: name of the set in captions.
        held_out: rows of validation images.
    """
    ranked, own, best, suggested, confident = rank_suspects(images.labels, probabilities)
    pictures = []
    for row in ranked[:GALLERY_SIZE].tolist():
        name, other, of_label, of_other = (
            images.classes[images.labels[row]],
            images.classes[suggested[row]],
            own[row],
            best[row],
        )
        alt = f"{what} image {row}: labelled {name} with {of_label:.2f}, taken for {other} with {of_other:.2f}"
        lines = (
            f"label {name} {of_label:.3f}",
            f"predicted {other} {of_other:.3f}",
            f"#{row}{' · held out' * (row in held_out)}",
        )
        pictures.append(Picture(data_uri(images.images[row]), alt, lines))
    return Suspects(len(images), pictures, len(ranked), int(confident.sum()))


class Ranking(NamedTuple):
    """rows: int64, of the suspected labels, the first with the most against it, which are `confident` where another class has
    its threshold, bool. Of all images: the probability of the label, of the likeliest class, and this class.
    """

    rows: Tensor
    own: Tensor
    best: Tensor
    suggested: Tensor
    confident: Tensor


def rank_suspects(labels: Tensor, probabilities: Tensor) -> Ranking:
    """The order of `suspect_labels`, for int64 labels (N,) and float probabilities (N, classes)."""
    classes = probabilities.shape[1]
    own = probabilities.gather(1, labels[:, None])[:, 0]
    thresholds = torch.bincount(labels, own.double(), minlength=classes) / torch.bincount(labels, minlength=classes)
    best, suggested = probabilities.max(1)
    rejected = (best > own).nonzero()[:, 0]
    rows = rejected[own[rejected].argsort(stable=True)]
    confident = (best >= thresholds[suggested])[rows]  # not of a class without images, which has no threshold
    return Ranking(rows, own, best, suggested, confident)


def find_duplicates(train: ImageSet, test: ImageSet, cosines: Tensor, rows: Tensor) -> tuple[list[Pair], int, int]:
    """Return `pairs`, `twins` and `contrary` of `Findings`.

    Args:
        train, test: the two sets.
        cosines, rows: nearest training image of each test image, from `find_nearest`.
    """
    first: dict[bytes, int] = {}
    for number in range(len(train)):
        first.setdefault(_digest(train.images[number]), number)
    twins = torch.tensor([first.get(_digest(image), -1) for image in test.images])
    repeated = twins >= 0
    others = min(int((~repeated).sum()), GALLERY_SIZE)
    pairs = []
    for place in cosines.masked_fill(repeated, -2.0).argsort(descending=True, stable=True)[:others]:
        row = rows[place]
        image, other_image = test.images[place].float(), train.images[row].float()
        difference = min(float((image - side).square().mean().sqrt()) for side in (other_image, other_image.flip(1)))
        likeness = (f"cosine {float(cosines[place]):.4f}", f"difference {difference:.1f}")
        pairs.append(Pair(_labelled("Test", test, int(place)), _labelled("Training", train, int(row)), likeness))
    contrary = int((train.labels[twins[repeated]] != test.labels[repeated]).sum())
    return pairs, int(repeated.sum()), contrary


def _digest(image: Tensor) -> bytes:
    return sha256(image.numpy().tobytes()).digest()


def _labelled(what: str, images: ImageSet, row: int) -> Picture:
    label = images.classes[images.labels[row]]
    return Picture(data_uri(images.images[row]), f"{what} image {row}: {label}", (f"{what[:5].lower()} {row}", label))
