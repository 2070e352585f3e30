"""Images to look at again: labels that a net and the image's neighbours reject, and test images that training images repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.figures import GALLERY_SIZE, Picture, data_uri

AT_ONCE = 256  # images that are compared with all training images
NEIGHBOURS = 30  # whose labels count; 10 are as good
MAX_VOTERS = 50_000  # training images; of more, as many are drawn

Neighbours = tuple[Tensor, Tensor]  # cosines, the nearest first, and the training images' rows, both (N, count)


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


def find_neighbours(known: Tensor, images: Tensor, count: int, advance: Callable[[int], None]) -> Neighbours:
    """For each image the known ones that are nearest by embedding, and their cosines with it.

    The mean of the known images is taken off first, as all that a net's embeddings have in common would make any two alike.
    As B. Barz and J. Denzler looked for the duplicates in CIFAR (Do We Train on Test Data?, J. Imaging 2020).

    known, images: embeddings (N, features) of one net. advance: is told how many further images were looked at.
    """
    middle = known.mean(0)
    columns = F.normalize(known - middle, dim=1).T
    nearest = []
    for part in images.split(AT_ONCE):
        nearest.append((F.normalize(part - middle, dim=1) @ columns).topk(min(count, len(known)), dim=1))
        advance(len(part))
    return torch.cat([cosines for cosines, _ in nearest]).cpu(), torch.cat([rows for _, rows in nearest]).cpu()


def neighbours_of_all(embeddings: Tensor, advance: Callable[[int], None]) -> Neighbours:
    """`find_neighbours` of the training images among themselves; an image that is its own neighbour has a cosine of -∞."""
    rows = torch.arange(len(embeddings))
    voters = rows
    if len(rows) > MAX_VOTERS:
        voters = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:MAX_VOTERS]
    cosines, places = find_neighbours(embeddings[voters.to(embeddings.device)], embeddings, NEIGHBOURS + 1, advance)
    others = voters[places]
    return cosines.masked_fill(others == rows[:, None], -torch.inf), others


def with_votes(probabilities: Tensor, neighbours: Neighbours, labels: Tensor) -> Tensor:
    """The mean of a net's probabilities (N, classes) and of the labels of an image's neighbours, weighted by exp(cosine).

    A net learns labels that it is trained on by heart, in the end also the wrong ones. The neighbours' are of other images:
    D. Bahri, H. Jiang and M. Gupta, Deep k-NN for Noisy Labels, ICML 2020.

    `results/cpu/scores.json` has how many changed labels of test images it finds. It helps nets that are trained little, or that
    have learned the wrong labels too; after a whole training of `laptop` the net alone is as good on test images.
    """
    cosines, rows = neighbours
    votes = torch.zeros_like(probabilities).scatter_add_(1, labels[rows], cosines.softmax(1).to(probabilities))
    return (probabilities + votes) / 2


def suspect_labels(images: ImageSet, probabilities: Tensor, what: str, held_out: Set[int] = frozenset()) -> Suspects:
    """The labels that are most against what `probabilities` (N, classes) say of the images.

    Suspected are those of which another class is likelier, the less probable the label the more. Counted are those whose other
    class has at least its threshold, the mean probability that the images of that label have for it, as some classes are harder
    to be sure of (C. Northcutt, L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR 2021).

    what: the images are called. held_out: rows that were validated on.
    """
    ranked, own, best, suggested, confident = rank_suspects(images.labels, probabilities)
    pictures = []
    for row in ranked[:GALLERY_SIZE].tolist():
        name, other, of_label, of_other = images.classes[images.labels[row]], images.classes[suggested[row]], own[row], best[row]
        alt = f"{what} image {row}: labelled {name} with {of_label:.2f}, taken for {other} with {of_other:.2f}"
        lines = (
            f"label {name} {of_label:.3f}",
            f"predicted {other} {of_other:.3f}",
            f"no. {row}{' · held out' * (row in held_out)}",
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


def find_duplicates(train: ImageSet, test: ImageSet, nearest: Neighbours) -> tuple[list[Pair], int, int]:
    """What test images repeat of the training images: `pairs`, `twins` and `contrary` of `Findings`.

    nearest: of the test images, as `find_neighbours` gives them.
    """
    first: dict[bytes, int] = {}
    for number in range(len(train)):
        first.setdefault(_digest(train.images[number]), number)
    twins = torch.tensor([first.get(_digest(image), -1) for image in test.images])
    repeated, cosines, rows = twins >= 0, nearest[0][:, 0], nearest[1][:, 0]
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
