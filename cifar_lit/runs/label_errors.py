"""Find likely label errors, and duplicates between training and test images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.files import write_text
from cifar_lit.base.text import csv_text
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.duplicates import near_duplicates
from cifar_lit.data.split import image_hashes
from cifar_lit.inference.logits import READ_AT_ONCE
from cifar_lit.runs.figures import GALLERY_SIZE, Picture, data_uri

OUT_OF_FOLD = "out_of_fold.npy"  # probabilities by predictors that were not fitted on the image; NaN if there is none
LIST = "label_errors.csv"
SIDE = 36  # pixels of the images that are searched for near-duplicates


class Pair(NamedTuple):
    """A test image and a training image."""

    test: Picture
    train: Picture


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
        probabilities = torch.where(unseen.isnan(), probabilities.float(), unseen)
    return probabilities, read_array(run / "margins.npy", probabilities.shape[:1])


def write_ranking(path: Path, images: ImageSet, ranking: Ranking, parts: Sequence[str]) -> None:
    """Write all labels as CSV, the most suspicious first. parts: part of each image, such as train."""
    columns = "index,path,label,probability_of_label,suggested,probability_of_suggested,score,part,suspected,confident"
    table: list[Sequence[object]] = [columns.split(",")]
    for place, row in enumerate(ranking.rows.tolist()):
        name = images.names[row] if images.names else ""
        label, suggested = images.classes[images.labels[row]], images.classes[ranking.suggested[row]]
        cells = [row, name, label, f"{ranking.own[row]:.6f}", suggested, f"{ranking.best[row]:.6f}"]
        cells += [f"{ranking.scores[row]:.6f}", parts[row]]
        for mark in (place < ranking.suspects, ranking.confident[row]):
            cells.append("yes" if mark else "no")
        table.append(cells)
    write_text(path, csv_text(table))


def _quantiles(values: Tensor) -> Tensor:
    """Return the fraction of smaller values for each value, double (N,)."""
    return torch.searchsorted(values.sort().values, values).double() / len(values)


def read_array(file: Path, shape: tuple[int, ...]) -> Tensor | None:
    """Return the numbers in a NumPy file, float32; None if there is no such file or they have another shape."""
    if not file.is_file():
        return None
    values = np.load(file)
    if values.shape != shape:  # images were added since
        return None
    return torch.from_numpy(values).float()


def find_duplicates(train: ImageSet, test: ImageSet) -> tuple[list[Pair], int, int]:
    """Return `pairs`, `identical` and `conflicting` of `Findings`."""
    rows: dict[int, int] = {}
    for row, key in enumerate(image_hashes(train).tolist()):
        rows.setdefault(key, row)
    same_rows = torch.tensor([rows.get(key, -1) for key in image_hashes(test).tolist()])
    is_identical = same_rows >= 0
    pairs: list[Pair] = []
    for group in near_duplicates(np.concatenate([_thumbnails(train), _thumbnails(test)])):
        if group[0] >= len(train):  # no training image
            continue
        test_rows = [row - len(train) for row in group if row >= len(train)]
        for row in test_rows:
            if not is_identical[row]:
                pairs.append(Pair(_labelled("Test", test, row), _labelled("Training", train, group[0])))
    conflicting = int((train.labels[same_rows[is_identical]] != test.labels[is_identical]).sum())
    return pairs[:GALLERY_SIZE], int(is_identical.sum()), conflicting


def _thumbnails(images: ImageSet) -> np.ndarray:
    """Return the images scaled to `SIDE` pixels, uint8 (N, H, W, C); the images may be larger than the memory."""
    parts = []
    for rows in torch.arange(len(images)).split(READ_AT_ONCE):
        scaled = F.adaptive_avg_pool2d(images.take(rows).permute(0, 3, 1, 2).float(), SIDE)
        parts.append(scaled.round().byte().permute(0, 2, 3, 1))
    return torch.cat(parts).numpy()


def _labelled(what: str, images: ImageSet, row: int) -> Picture:
    label = images.classes[images.labels[row]]
    name = images.name(row)
    return Picture(data_uri(images.images[row]), f"{what} image {name}: {label}", (f"{what[:5].lower()} {name}", label))
