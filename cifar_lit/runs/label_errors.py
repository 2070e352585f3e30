"""Find likely label errors, and duplicates between training and test images."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.files import atomic_write, file_size
from cifar_lit.runs.figures import GALLERY_SIZE, Picture, data_uri
from cifar_lit.text import csv_cell

MAX_HEADER = 1 << 16  # bytes before the numbers of a NumPy file, 128 in those of a run
COMPARED = 1000  # test images whose pixels are compared with those of the most similar training image
# Share of the standard deviation of the pixels. In CIFAR-10, 1 % of the test images are as near to a training image.
MAX_DIFFERENCE = 0.4
OUT_OF_FOLD = "out_of_fold.npy"  # probabilities by predictors that were not fitted on the image; NaN if there is none
LIST = "label_errors.csv"
AT_ONCE = 256  # images compared with all training images in one step


class Pair(NamedTuple):
    """A test image, the most similar training image, and a caption."""

    test: Picture
    train: Picture
    lines: Sequence[str]


class Suspects(NamedTuple):
    """Suspected labels of a set."""

    images: int  # size of the set
    pictures: Sequence[Picture]  # images with the least trusted labels
    rejected: int  # images with a suspected label
    confident: int  # suspected labels that confident learning counts as wrong


class Findings(NamedTuple):
    """Suspected labels, and duplicates between training and test images."""

    train: Suspects
    test: Suspects
    pairs: Sequence[Pair]  # test images that are nearly a training image, but not identical
    identical: int  # test images identical to a training image
    conflicting: int  # identical test images with a different label


def find_nearest(train: Tensor, test: Tensor, advance: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """Find the training image with the greatest cosine similarity to each test image.

    The mean training embedding is subtracted first: it is common to all images and makes any two similar. Method:
    B. Barz and J. Denzler, Do We Train on Test Data?, J. Imaging 2020.

    Args:
        train: embeddings of the training images (N, features).
        test: embeddings of the test images (M, features), from the same net.
        advance: callback with the number of images processed since the last call.

    Returns:
        Cosines and rows of training images, float (M,) and int64 (M,), on the CPU.
    """
    mean = train.mean(0)
    columns = F.normalize(train - mean, dim=1).T
    cosines, rows = [], []
    for part in test.split(AT_ONCE):
        best = (F.normalize(part - mean, dim=1) @ columns).max(1)
        cosines.append(best.values)
        rows.append(best.indices)
        advance(len(part))
    return torch.cat(cosines).cpu(), torch.cat(rows).cpu()


def suspect_labels(images: ImageSet, ranking: Ranking, what: str, parts: Sequence[str] = ()) -> Suspects:
    """Return the suspected labels of a set with pictures, the least trusted label first.

    Args:
        what: name of the set in alternative texts.
        parts: part of each image, such as train; those of other parts are marked.
    """
    pictures = []
    for row in ranking.rows[: min(ranking.suspects, GALLERY_SIZE)].tolist():
        label, predicted = images.classes[images.labels[row]], images.classes[ranking.suggested[row]]
        own, best = float(ranking.own[row]), float(ranking.best[row])
        name = images.name(row)
        alt = f"{what} image {name}: label {label} {own:.2f}, predicted {predicted} {best:.2f}"
        if parts and parts[row] != "train":
            name = f"{name} · held out"
        lines = (f"label {label} {own:.3f}", f"predicted {predicted} {best:.3f}", name)
        pictures.append(Picture(data_uri(images.images[row]), alt, lines))
    return Suspects(len(images), pictures, ranking.suspects, int(ranking.confident.sum()))


class Ranking(NamedTuple):
    """N images by how much their labels are trusted."""

    rows: Tensor  # all images, the least trusted suspected label first, int64 (N,)
    suspects: int  # number of suspected labels, which come first
    scores: Tensor  # trust in each label, double (N,)
    own: Tensor  # probability of the label, float (N,)
    best: Tensor  # probability of the predicted class, float (N,)
    suggested: Tensor  # predicted class, int64 (N,)
    confident: Tensor  # whether confident learning counts an image as mislabelled, bool (N,)


def rank_labels(labels: Tensor, probabilities: Tensor, margins: Tensor | None = None) -> Ranking:
    """Rank the labels of a set, those first that contradict the predictions.

    The score of a label is the quantile of the logit margin of the net: the logit of the label minus the largest other
    logit. With `margins`, it is the mean of that and the quantile of the margin over the training. After a short
    training, the margin of the net ranks planted errors better than the one over the training. After a long one it is
    the opposite, because the net memorises wrong labels (`results/cpu/label-noise.json` and `label-noise-long.json`).

    A label is suspected if another class is more probable, or had a larger logit on average over the training.
    Confident learning has a threshold for each class: its mean probability over the images labelled with it. A
    suspected label counts as mislabelled if the predicted class reaches its threshold (C. Northcutt, L. Jiang and I.
    Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR 2021).

    labels: int64 (N,). probabilities: float (N, classes). margins: `margins.npy` of the run, float (N,), if it has one.
    """
    classes = probabilities.shape[1]
    own = probabilities.gather(1, labels[:, None])[:, 0]
    thresholds = torch.bincount(labels, own.double(), minlength=classes) / torch.bincount(labels, minlength=classes)
    best, suggested = probabilities.max(1)
    suspected = best > own
    if margins is not None:
        suspected |= margins < 0
    logits = probabilities.double().clamp_min(1e-30).log()  # up to a constant of each image
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    scores = _quantiles(logits.gather(1, labels[:, None])[:, 0] - others)
    if margins is not None:
        trained = ~margins.isnan()
        scores[trained] = (scores[trained] + _quantiles(margins[trained])) / 2
    rows = (scores - suspected.double()).argsort(stable=True)  # a score is below 1
    confident = suspected & (best >= thresholds[suggested])  # false for NaN, the threshold of a class without images
    return Ranking(rows, int(suspected.sum()), scores, own, best, suggested, confident)


def evidence(run: Path, probabilities: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities and margins to rank labels by: out-of-fold ones where a run has them.

    Args:
        run: a run folder, perhaps with `OUT_OF_FOLD` or margins.npy.
        probabilities: those of the run's net for all training images, (N, classes), used for images without others.
    """
    unseen = read_array(run / OUT_OF_FOLD, tuple(probabilities.shape))
    if unseen is not None:
        is_known = ((unseen >= 0) & (unseen <= 1)).all(1, keepdim=True)
        probabilities = torch.where(is_known, unseen, probabilities.float())
    return probabilities, read_array(run / "margins.npy", probabilities.shape[:1])


def write_ranking(path: Path, images: ImageSet, ranking: Ranking, parts: Sequence[str]) -> None:
    """Write all labels as CSV, the most suspicious first. parts: part of each image, such as train."""
    columns = "index,path,label,probability_of_label,suggested,probability_of_suggested,score,part,suspected,confident"
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns.split(","))
        for place, row in enumerate(ranking.rows.tolist()):
            name = ""
            if images.names:
                name = images.names[row]
            label, suggested = images.classes[images.labels[row]], images.classes[ranking.suggested[row]]
            cells = [row, csv_cell(name), csv_cell(label), f"{ranking.own[row]:.6f}", csv_cell(suggested)]
            cells += [f"{ranking.best[row]:.6f}", f"{ranking.scores[row]:.6f}", parts[row]]
            for mark in (place < ranking.suspects, ranking.confident[row]):
                cells.append("yes" if mark else "no")
            writer.writerow(cells)


def _quantiles(values: Tensor) -> Tensor:
    """Return the fraction of smaller values for each value, double (N,)."""
    return torch.searchsorted(values.sort().values, values).double() / len(values)


def read_array(file: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return the numbers in a NumPy file, float32; None if there is no such file or they have another shape."""
    try:
        # A pipe would block, and a header may be as long as the file.
        file_size(file, MAX_HEADER + 8 * math.prod(shape))
        # Mapped, because a damaged header may claim more than the memory.
        values = np.lib.format.open_memmap(file, mode="r")
    except Exception:  # a damaged header raises OSError, ValueError, OverflowError, TokenError and others
        return None
    if values.dtype.kind != "f" or values.shape != shape:
        return None
    return torch.from_numpy(values.astype(np.float32))


def find_duplicates(train: ImageSet, test: ImageSet, cosines: Tensor, rows: Tensor) -> tuple[list[Pair], int, int]:
    """Return `pairs`, `identical` and `conflicting` of `Findings`. cosines, rows: results of `find_nearest`.

    Of the test images most similar to a training image, those whose pixels differ plainly are left out.
    """
    same_rows = identical_rows(train, test)
    is_identical = same_rows >= 0
    count = min(int((~is_identical).sum()), COMPARED)
    pairs: list[Pair] = []
    for test_row in cosines.masked_fill(is_identical, -2.0).argsort(descending=True, stable=True)[:count].tolist():
        train_row = int(rows[test_row])
        image, other = test.images[test_row].float(), train.images[train_row].float()
        squares = F.mse_loss(image, other).item(), F.mse_loss(image, other.flip(1)).item()
        difference = math.sqrt(min(squares))
        if difference > MAX_DIFFERENCE * float(image.std()):
            continue
        caption = (f"cosine {float(cosines[test_row]):.4f}", f"difference {difference:.1f}")
        pairs.append(Pair(_labelled("Test", test, test_row), _labelled("Training", train, train_row), caption))
    conflicting = int((train.labels[same_rows[is_identical]] != test.labels[is_identical]).sum())
    return pairs[:GALLERY_SIZE], int(is_identical.sum()), conflicting


def identical_rows(train: ImageSet, test: ImageSet) -> Tensor:
    """Return the row of the first training image with the pixels of each test image, int64 (M,); -1 if none has."""
    first_rows: dict[bytes, int] = {}
    for row, image in enumerate(train.images):
        first_rows.setdefault(_digest(image), row)
    return torch.tensor([first_rows.get(_digest(image), -1) for image in test.images])


def _digest(image: Tensor) -> bytes:
    return sha256(image.numpy().tobytes()).digest()


def _labelled(what: str, images: ImageSet, row: int) -> Picture:
    label = images.classes[images.labels[row]]
    name = images.name(row)
    return Picture(data_uri(images.images[row]), f"{what} image {name}: {label}", (f"{what[:5].lower()} {name}", label))
