"""Find likely label errors, and duplicates between training and test images."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.files import display_path, write_text
from cifar_lit.base.text import csv_cell, csv_text
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.duplicates import near_duplicates
from cifar_lit.data.split import image_hashes
from cifar_lit.inference.logits import OUT_OF_FOLD, READ_AT_ONCE
from cifar_lit.runs.figures import GALLERY_SIZE, Picture, data_uri

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


class Duplicates(NamedTuple):
    """Duplicates between training and test images."""

    pairs: Sequence[Pair]  # test images that are nearly a training image, but not identical
    identical: int  # test images identical to a training image
    conflicting: int  # identical test images with a different label


class Findings(NamedTuple):
    """Suspected labels, and duplicates between training and test images."""

    train: Suspects | None  # None without a list
    test: Suspects
    duplicates: Duplicates | None  # None if they were not searched


Listed = tuple[int, dict[str, str]]  # row of an image in its set, and its row of `LIST` by column


def suspect_labels(images: ImageSet, listed: Sequence[Listed], what: str) -> Suspects:
    """Return the suspected labels of a set with pictures, in the order of a list.

    what: name of the set in alternative texts.
    """
    suspected = [(row, cells) for row, cells in listed if cells["suspected"] == "yes"]
    pictures = []
    for row, cells in suspected[:GALLERY_SIZE]:
        own, best = float(cells["probability_of_label"]), float(cells["probability_of_suggested"])
        label, suggested = f"label {cells['label']}", f"predicted {cells['suggested']}"
        lines = (f"{label} {100 * own:.1f} %", f"{suggested} {100 * best:.1f} %", images.name(row))
        pictures.append(Picture(data_uri(images.images[row]), f"{what} image: {', '.join(lines)}", lines))
    return Suspects(
        len({row for row, _ in listed}),
        pictures,
        len(suspected),
        sum(cells["confident"] == "yes" for _, cells in listed),
    )


class Ranking(NamedTuple):
    """N images by how much their labels are trusted."""

    rows: Tensor  # all images, the least trusted suspected label first, int64 (N,)
    suspects: int  # number of suspected labels, which come first
    scores: Tensor  # trust in each label, double (N,)
    own: Tensor  # probability of the label, float (N,)
    best: Tensor  # probability of the predicted class, float (N,)
    suggested: Tensor  # predicted class, int64 (N,)
    confident: Tensor  # whether confident learning counts an image as mislabelled, bool (N,)
    pairs: Tensor | None = None  # with several labels, what is ranked: an image and a label each, int64 (N, 2)


def rank_labels(labels: Tensor, probabilities: Tensor) -> Ranking:
    """Rank the labels of a set, those first that contradict the predictions.

    The score of a label is the quantile of its logit margin: the logit of the label minus the largest other logit. A
    label is suspected if another class is more probable. Confident learning has a threshold for each class: its mean
    probability over the images labelled with it. A suspected label counts as mislabelled if the predicted class reaches
    its threshold (C. Northcutt, L. Jiang and I. Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels,
    JAIR 2021).

    labels: int64 (N,). probabilities: float (N, classes), of predictors that were not fitted on the image. With several
    labels, float (N, classes), each pair of an image and a known label is ranked as one of the two classes 0 and 1.
    """
    if labels.ndim == 2:
        known = labels >= 0
        has = probabilities[known]
        ranking = rank_labels(labels[known].long(), torch.stack((1 - has, has), 1))
        return ranking._replace(pairs=known.nonzero())
    classes = probabilities.shape[1]
    own = probabilities.gather(1, labels[:, None])[:, 0]
    thresholds = torch.bincount(labels, own.double(), minlength=classes) / torch.bincount(labels, minlength=classes)
    best, suggested = probabilities.max(1)
    suspected = best > own
    logits = probabilities.double().clamp_min(1e-30).log()  # up to a constant of each image
    margins = logits.gather(1, labels[:, None])[:, 0] - logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    scores = torch.searchsorted(margins.sort().values, margins).double() / len(margins)  # fraction of smaller margins
    rows = (scores - suspected.double()).argsort(stable=True)  # a score is below 1
    confident = suspected & (best >= thresholds[suggested])  # false for NaN, the threshold of a class without images
    return Ranking(rows, int(suspected.sum()), scores, own, best, suggested, confident)


# ---- The list of a run: one row per image, the most suspicious label first.


def listed_images(images: ImageSet, rows: Tensor, ranking: Ranking, parts: Sequence[str]) -> list[Listed]:
    """Return the list of a ranking.

    rows: those of the ranked images in the set. parts: part of each image of the set. With several labels, the list
    has all suspected ones (`no cat` is a missing cat), and the least trusted one of each other image.
    """
    listed = []
    seen: set[int] = set()
    for place, ranked in enumerate(ranking.rows.tolist()):
        image, names = ranked, images.classes
        if ranking.pairs is not None:
            image, label = ranking.pairs[ranked].tolist()
            names = f"no {names[label]}", names[label]
        if place >= ranking.suspects and image in seen:
            continue
        seen.add(image)
        row = int(rows[image])
        suggested = int(ranking.suggested[ranked])
        own = names[int(images.labels[row] if ranking.pairs is None else images.labels[row, label])]
        cells = {
            "index": str(row),
            "path": images.names[row] if images.names else "",
            "label": own,
            "probability_of_label": f"{ranking.own[ranked]:.6f}",
            "suggested": names[suggested],
            "probability_of_suggested": f"{ranking.best[ranked]:.6f}",
            "score": f"{ranking.scores[ranked]:.6f}",
            "part": parts[row],
            "suspected": "yes" if place < ranking.suspects else "no",
            "confident": "yes" if ranking.confident[ranked] else "no",
        }
        listed.append((row, cells))
    return listed


def write_list(run: Path, listed: Sequence[Listed]) -> None:
    """Write `LIST` to a run folder."""
    write_text(run / LIST, csv_text([listed[0][1].keys(), *(cells.values() for _, cells in listed)]))


def read_list(run: Path, images: ImageSet) -> list[Listed] | None:
    """Return the list of a run for a set, which may have changed since the training; None if the run has no list.

    Images are found by their names, or by row if they have none. Those that the set no longer has are left out.
    """
    if not (run / LIST).is_file():
        return None
    rows = {csv_cell(name): row for row, name in enumerate(images.names)}
    listed = []
    with (run / LIST).open(newline="", encoding="utf-8-sig") as file:
        for cells in csv.DictReader(file):
            row = rows.get(cells["path"]) if images.names else int(cells["index"])
            if row is not None:
                listed.append((row, cells))
    return listed


def list_training_labels(run: Path, images: ImageSet, parts: Sequence[str]) -> None:
    """Write `LIST` of a run with out-of-fold predictions."""
    if not (run / OUT_OF_FOLD).is_file():
        return
    probabilities = torch.from_numpy(np.load(run / OUT_OF_FOLD))
    rows = (~probabilities[:, 0].isnan()).nonzero()[:, 0]
    ranking = rank_labels(images.labels[rows], probabilities[rows])
    write_list(run, listed_images(images, rows, ranking, parts))


def missing_list(run: Path) -> str:
    """Return why a run has no list of its labels, and what to do."""
    fault = f"{display_path(run)} has no {LIST}: its net was trained on these labels and may have learned wrong ones"
    return f"{fault}. To find them, train with --folds 5 or --recipe finetune, and review that run"


def find_duplicates(train: ImageSet, test: ImageSet) -> Duplicates:
    """Return the duplicates between training and test images."""
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
    conflicting = 0
    for row in is_identical.nonzero()[:, 0].tolist():
        conflicting += train.label_text(int(same_rows[row])) != test.label_text(row)
    return Duplicates(pairs[:GALLERY_SIZE], int(is_identical.sum()), conflicting)


def _thumbnails(images: ImageSet) -> np.ndarray:
    """Return the images scaled to `SIDE` pixels, uint8 (N, H, W, C); the images may be larger than the memory."""
    parts = []
    for rows in torch.arange(len(images)).split(READ_AT_ONCE):
        scaled = F.adaptive_avg_pool2d(images.take(rows).permute(0, 3, 1, 2).float(), SIDE)
        parts.append(scaled.round().byte().permute(0, 2, 3, 1))
    return torch.cat(parts).numpy()


def _labelled(what: str, images: ImageSet, row: int) -> Picture:
    label = images.label_text(row)
    name = images.name(row)
    return Picture(data_uri(images.images[row]), f"{what} image {name}: {label}", (f"{what[:5].lower()} {name}", label))
