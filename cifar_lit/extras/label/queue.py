"""The images of a review in their order, and what the reviewer sees of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.photos.decode import DecodeError, Preparation, decode, image_size
from cifar_lit.runs.figures import data_uri

SIDE, SMALL_SIDE = 768, 160  # pixels of the image and of its neighbours on the page
NEIGHBOURS = 5
TOP = 9  # classes with their probabilities


class Summary(NamedTuple):
    """An image in the list of the page."""

    name: str  # the name of its file, or its row
    label: str | None  # None for an image without a label
    predicted: str
    probability: float  # the predicted class has it


@dataclass(frozen=True)
class Queue:
    """The M images to review, and the N training images among which neighbours are searched."""

    keys: Sequence[str]  # file or row of each image, as in `Decision.image`
    labels: Sequence[str | None]  # class of each image; None for an image without a label
    probabilities: Tensor  # float (M, classes)
    embeddings: Tensor  # float (M, features)
    train: ImageSet
    train_keys: Sequence[str]
    train_embeddings: Tensor  # float (N, features)

    @cached_property
    def summaries(self) -> list[Summary]:
        """What the list of the page shows of each image."""
        highest = self.probabilities.max(1)
        predicted = [self.train.classes[label] for label in highest.indices.tolist()]
        rows = zip(self.keys, self.labels, predicted, highest.values.tolist(), strict=True)
        return [Summary(Path(key).name, *row) for key, *row in rows]

    def details(self, item: int) -> dict[str, object]:
        """Return an image, its most probable classes, and the nearest training images with their labels.

        Nearest by the cosine of embeddings, from which the mean of the training images is subtracted as in
        `label_errors.find_nearest`.
        """
        mean, directions = self._directions
        cosines = directions @ F.normalize(self.embeddings[item] - mean, dim=0)
        nearest = cosines.topk(min(NEIGHBOURS + 1, len(cosines))).indices.tolist()
        classes = self.train.classes
        neighbours: list[tuple[str, str]] = []  # picture and label
        for row in nearest:
            if self.train_keys[row] != self.keys[item] and len(neighbours) < NEIGHBOURS:
                picture = self._picture(self.train_keys[row], SMALL_SIDE)
                neighbours.append((picture, classes[self.train.labels[row]]))
        top = self.probabilities[item].topk(min(TOP, len(classes)))
        names = [classes[label] for label in top.indices.tolist()]
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
