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
    """A test image, the most similar training image, and a caption."""

    test: Picture
    train: Picture
    lines: Sequence[str]


class Suspects(NamedTuple):
    """Suspected labels of a set."""

    images: int  # size of the set
    pictures: Sequence[Picture]  # images with the least probable labels
    rejected: int  # images predicted as a different class than their label
    confident: int  # those that confident learning counts as mislabelled


class Findings(NamedTuple):
    """Suspected labels, and duplicates between training and test images."""

    train: Suspects
    test: Suspects
    pairs: Sequence[Pair]  # test images most similar to a training image, but not identical
    twins: int  # test images identical to a training image
    contrary: int  # twins with a different label


def find_nearest(known: Tensor, images: Tensor, advance: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """Find the known image with the greatest cosine similarity to each image.

    The mean of the known images is subtracted first, because the common part of a net's embeddings makes any two images
    similar. Method: B. Barz and J. Denzler, Do We Train on Test Data?, J. Imaging 2020.

    Args:
        known: embeddings (N, features).
        images: embeddings (images, features) of the same net.
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

    A label is suspected if another class is more probable. Confident learning counts those whose predicted class
    reaches its threshold: the mean probability of that class over the images labelled with it (C. Northcutt, L. Jiang
    and I. Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR 2021).

    Args:
        images: images with labels.
        probabilities: predicted probabilities, float (N, classes).
        what: name of the set in alternative texts.
        held_out: rows of validation images.
    """
    ranked, own, best, suggested, confident = rank_suspects(images.labels, probabilities)
    pictures = []
    for row in ranked[:GALLERY_SIZE].tolist():
        label, predicted = images.classes[images.labels[row]], images.classes[suggested[row]]
        alt = f"{what} image {row}: label {label} {own[row]:.2f}, predicted {predicted} {best[row]:.2f}"
        mark = " · held out" if row in held_out else ""
        lines = (f"label {label} {own[row]:.3f}", f"predicted {predicted} {best[row]:.3f}", f"#{row}{mark}")
        pictures.append(Picture(data_uri(images.images[row]), alt, lines))
    return Suspects(len(images), pictures, len(ranked), int(confident.sum()))


class Ranking(NamedTuple):
    """Suspected labels, and probabilities of all images."""

    rows: Tensor  # suspected labels, the least probable first, int64
    own: Tensor  # probability of each image's label
    best: Tensor  # probability of each image's predicted class
    suggested: Tensor  # predicted classes
    confident: Tensor  # whether each of `rows` reaches the threshold of confident learning, bool


def rank_suspects(labels: Tensor, probabilities: Tensor) -> Ranking:
    """Rank labels as `suspect_labels` does. labels: int64 (N,); probabilities: float (N, classes)."""
    classes = probabilities.shape[1]
    own = probabilities.gather(1, labels[:, None])[:, 0]
    thresholds = torch.bincount(labels, own.double(), minlength=classes) / torch.bincount(labels, minlength=classes)
    best, suggested = probabilities.max(1)
    rejected = (best > own).nonzero()[:, 0]
    rows = rejected[own[rejected].argsort(stable=True)]
    confident = (best >= thresholds[suggested])[rows]  # NaN, the threshold of a class without images, compares as false
    return Ranking(rows, own, best, suggested, confident)


def find_duplicates(train: ImageSet, test: ImageSet, cosines: Tensor, rows: Tensor) -> tuple[list[Pair], int, int]:
    """Return `pairs`, `twins` and `contrary` of `Findings`. cosines, rows: from `find_nearest`, for the test images."""
    first_rows: dict[bytes, int] = {}
    for row, image in enumerate(train.images):
        first_rows.setdefault(_digest(image), row)
    twins = torch.tensor([first_rows.get(_digest(image), -1) for image in test.images])
    is_twin = twins >= 0
    count = min(int((~is_twin).sum()), GALLERY_SIZE)
    pairs = []
    for place in cosines.masked_fill(is_twin, -2.0).argsort(descending=True, stable=True)[:count].tolist():
        row = int(rows[place])
        image, known = test.images[place].float(), train.images[row].float()
        difference = min(float((image - side).square().mean().sqrt()) for side in (known, known.flip(1)))
        caption = (f"cosine {float(cosines[place]):.4f}", f"difference {difference:.1f}")
        pairs.append(Pair(_labelled("Test", test, place), _labelled("Training", train, row), caption))
    contrary = int((train.labels[twins[is_twin]] != test.labels[is_twin]).sum())
    return pairs, int(is_twin.sum()), contrary


def _digest(image: Tensor) -> bytes:
    return sha256(image.numpy().tobytes()).digest()


def _labelled(what: str, images: ImageSet, row: int) -> Picture:
    label = images.classes[images.labels[row]]
    return Picture(data_uri(images.images[row]), f"{what} image {row}: {label}", (f"{what[:5].lower()} {row}", label))
