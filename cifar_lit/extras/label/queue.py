"""The images of a review in their order, and what the reviewer sees of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.errors import UsageError
from cifar_lit.base.text import counted, listed, note, progress
from cifar_lit.data.image_set import ImageSet, label_text
from cifar_lit.data.photos.decode import DecodeError, Preparation, decode, image_size
from cifar_lit.data.photos.layout import TABLES
from cifar_lit.data.photos.table import read_table
from cifar_lit.extras.label.table import Labels, is_cell
from cifar_lit.inference.classify import find_images
from cifar_lit.inference.load import Classifier
from cifar_lit.inference.logits import FEATURES, OUT_OF_FOLD, logits_and_embeddings
from cifar_lit.inference.model_file import LoadedNet
from cifar_lit.runs.figures import data_uri
from cifar_lit.runs.label_errors import Listed, missing_list, read_list

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

SIDE, SMALL_SIDE = 768, 160  # pixels of the image and of its neighbours on the page
NEIGHBOURS = 5
TOP = 9  # classes with their probabilities


class Summary(NamedTuple):
    """An image in the list of the page."""

    name: str  # the name of its file, or its row
    label: str | None  # None for an image without a label
    predicted: str
    probability: float  # the most probable class has it


@dataclass(frozen=True)
class Queue:
    """The M images to review, and the N training images among which neighbours are searched."""

    keys: Sequence[str]  # file or row of each image, as in `Decision.image`
    labels: Sequence[str | None]  # class of each image; None for an image without a label
    suspects: int | None  # number of suspected labels, which come first; None without a list
    probabilities: Tensor  # float (M, classes)
    embeddings: Tensor  # float (M, features)
    net: LoadedNet
    train: ImageSet
    train_keys: Sequence[str]  # all images of the set
    train_rows: Sequence[int]  # the N images in the set
    train_embeddings: Tensor  # float (N, features)

    @cached_property
    def summaries(self) -> list[Summary]:
        """What the list of the page shows of each image."""
        highest = self.probabilities.max(1)
        labels: Tensor = highest.indices
        if self.net.card.thresholds is not None:
            labels = self.probabilities >= torch.tensor(self.net.card.thresholds)
        predicted = [label_text(label, self.net.classes) for label in labels]
        rows = zip(self.keys, self.labels, predicted, highest.values.tolist(), strict=True)
        return [Summary(Path(key).name, *row) for key, *row in rows]

    def details(self, item: int) -> dict[str, object]:
        """Return an image, its most probable classes, and the nearest training images with their labels.

        Nearest by the cosine of embeddings, from which the mean of the training images is subtracted.
        """
        mean, directions = self._directions
        cosines = directions @ F.normalize(self.embeddings[item] - mean, dim=0)
        nearest = cosines.topk(min(NEIGHBOURS + 1, len(cosines))).indices.tolist()
        neighbours: list[tuple[str, str]] = []  # picture and label
        for row in [self.train_rows[place] for place in nearest]:
            if self.train_keys[row] != self.keys[item] and len(neighbours) < NEIGHBOURS:
                picture = self._picture(self.train_keys[row], SMALL_SIDE)
                neighbours.append((picture, self.train.label_text(row)))
        top = self.probabilities[item].topk(min(TOP, len(self.net.classes)))
        names = [self.net.classes[label] for label in top.indices.tolist()]
        return {
            "picture": self._picture(self.keys[item], SIDE),
            "top": list(zip(names, top.values.tolist(), strict=True)),
            "nearest": neighbours,
        }

    @cached_property
    def _directions(self) -> tuple[Tensor, Tensor]:
        """Mean embedding of the training images, and the direction of each from there."""
        mean = self.train_embeddings.mean(0)
        return mean, F.normalize(self.train_embeddings - mean, dim=1)

    def _picture(self, key: str, side: int) -> str:
        """Return an image of at most `side` pixels as a data URI; empty if its file is missing or damaged."""
        if key.isdecimal():
            return data_uri(self.train.images[self.train_keys.index(key)], side)
        try:
            height, width = image_size(key)
            scale = min(1.0, side / max(height, width))
            size = max(1, round(height * scale)), max(1, round(width * scale))
            return data_uri(torch.from_numpy(decode(key, Preparation(size, 3, "squash", self.train.levels))), side)
        except DecodeError:
            return ""


# ---- the images to review


def make_queue(
    run: Path, classifier: Classifier, data: ImageData, labels: Labels, pool: str | None, limit: int | None
) -> Queue:
    """Return the images to review: those of the run's list in its order, or all training images without a list.

    With a pool, a folder or a table with a column path, they are its images, which have no label.
    """
    images, keys, net = data.train_images, labels.keys, classifier.net
    if pool and labels.column == "image":
        raise UsageError("--pool adds files to your own images, and this run has none: review it without --pool")
    if pool:
        files, pixels = _read_pool(Path(pool).expanduser(), classifier, limit)
    ranked = read_list(run, images)
    if ranked is not None:  # with several labels, an image may be listed several times
        first: dict[int, Listed] = {}
        for each in ranked:
            first.setdefault(each[0], each)
        ranked = [*first.values()]
    if ranked is None or pool:
        rows = list(range(len(images)))
        suspects = None
        probabilities, embeddings = _embed(net, images.take, rows, "training images")
    else:
        rows = [row for row, _ in ranked]
        suspects = sum(cells["suspected"] == "yes" for _, cells in ranked)
        probabilities, embeddings = _stored(run, net, images, ranked)
    train = (net, images, keys, rows, embeddings)
    if pool:
        probabilities, embeddings = _embed(net, pixels.__getitem__, range(len(files)), "images to label")
        return Queue(files, [None] * len(files), None, probabilities, embeddings, *train)
    if ranked is None:
        note(missing_list(run))
    rows = rows[:limit]
    names = [labels.labels[row] for row in rows]
    return Queue([keys[row] for row in rows], names, suspects, probabilities[:limit], embeddings[:limit], *train)


def _embed(net: LoadedNet, take: Callable[[Tensor], Tensor], rows: Sequence[int], what: str) -> tuple[Tensor, Tensor]:
    """Return probabilities (N, classes) and embeddings (N, features) of images."""
    with progress(f"computing embeddings of the {what}", len(rows)) as advance:
        logits, embeddings = logits_and_embeddings(net, take, torch.tensor(rows), advance)
    return net.probabilities(logits.to(net.mean.device)).cpu(), embeddings


def _stored(run: Path, net: LoadedNet, images: ImageSet, ranked: Sequence[Listed]) -> tuple[Tensor, Tensor]:
    """Return probabilities and embeddings of the images in a list, from the files that were written with it."""
    indices = [int(cells["index"]) for _, cells in ranked]
    if (run / FEATURES).is_file():
        arrays = [np.load(run / name, mmap_mode="r")[indices] for name in (OUT_OF_FOLD, FEATURES)]
        return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]).float()
    _, embeddings = _embed(net, images.take, [row for row, _ in ranked], "training images")
    probabilities = np.load(run / "probabilities.npy")  # a cross-validation
    return torch.from_numpy(probabilities[indices]), embeddings


def _read_pool(place: Path, classifier: Classifier, limit: int | None) -> tuple[list[str], Tensor]:
    """Return the readable images of a folder or table: files, and pixels, uint8 (M, H, W, C)."""
    if place.name.lower().endswith(TABLES):
        files = [str(place.parent / row.path) for row in read_table(place, labelled=False).rows]
    else:
        files = [file.path for file in find_images([str(place)], sys.stdin.buffer) if file.error is None]
    paths = list(dict.fromkeys(os.path.normpath(Path(file).absolute()) for file in files))
    names, pixels, bad = [], [], []
    for path in paths[:limit]:
        if not is_cell(path):
            bad.append(f"{path} has a name that a table cannot hold")
            continue
        try:
            pixels.append(torch.from_numpy(decode(path, classifier.preparation)))
            names.append(path)
        except DecodeError as error:
            bad.append(str(error))
    if bad:
        note(f"left out {counted(len(bad), 'image')}: {listed(bad)}")
    if not names:
        raise UsageError(f"there are no readable images in {place}: name a folder of images, or a table of them")
    return names, torch.stack(pixels)
