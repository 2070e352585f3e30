"""The images of a review in their order, and what the reviewer sees of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.data.decode import DecodeError, decode, image_size
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import Failure
from cifar_lit.files import file_size
from cifar_lit.runs.figures import data_uri
from cifar_lit.runs.label_errors import rank_suspects

MARGINS = "margins.npy"  # mean logit margin of each training image, written by a training
SIDE, SMALL_SIDE = 768, 160  # pixels of the image and of its neighbours on the page
NEIGHBOURS = 5
TOP = 9  # classes with their probabilities


def most_suspicious(run: Path, labels: Tensor, probabilities: Tensor) -> Tensor:
    """Return all rows, the label that is most likely wrong first, int64 (N,).

    If the run has `margins.npy`, float (N,), the lowest margin comes first. Images without a margin (NaN), which were
    not trained on, are ranked by the probability of their label, and spread evenly among the others. Without the file,
    suspected labels come first (see `rank_suspects`), and each part is ordered by the probability of the label.

    Args:
        run: the run folder.
        labels: int64 (N,).
        probabilities: float (N, classes).
    """
    ranking = rank_suspects(labels, probabilities)
    by_probability = torch.where(ranking.suggested == labels, ranking.own + 1, ranking.own)
    if not (run / MARGINS).is_file():
        return by_probability.argsort(stable=True)
    margins = read_array(run / MARGINS, (len(labels),))
    quantiles = torch.empty(len(labels), dtype=torch.float64)
    for part, scores in ((~margins.isnan(), margins), (margins.isnan(), by_probability.double())):
        ranks = scores[part].argsort(stable=True).argsort(stable=True)
        quantiles[part] = (ranks + 0.5) / max(1, len(ranks))
    return quantiles.argsort(stable=True)


def read_array(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers in a file of NumPy, float64. Raise Failure if they do not have this shape."""
    try:
        file_size(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: the header may name any shape
        if array.shape != shape or array.dtype.kind != "f":
            raise ValueError(path)
    except (OSError, ValueError):
        size = " × ".join(map(str, shape))
        fault = f"{path} does not hold {size} numbers, as the data of this run need"
        raise Failure(f"{fault}: if the data were moved or changed, name those of the run with --data-dir") from None
    return torch.from_numpy(array.astype(np.float64))


@dataclass(frozen=True)
class Queue:
    """The images to review.

    Args:
        keys: file or row of each image, as in `Decision.image`.
        labels: class of each image; None for an image without a label.
        probabilities: float (M, classes).
        embeddings: float (M, features).
        held_out: whether each image is a validation image.
        train: training images, among which neighbours are searched.
        train_keys: file or row of each training image.
        train_embeddings: float (N, features).
    """

    keys: Sequence[str]
    labels: Sequence[str | None]
    probabilities: Tensor
    embeddings: Tensor
    held_out: Sequence[bool]
    train: ImageSet
    train_keys: Sequence[str]
    train_embeddings: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def predicted(self, item: int) -> str:
        """Return the most probable class of an image."""
        return self.train.classes[int(self.probabilities[item].argmax())]

    def summary(self, item: int) -> dict[str, Any]:
        """Return what the page lists of each image."""
        name = self.keys[item] if self.keys[item].isdecimal() else Path(self.keys[item]).name
        probability = round(float(self.probabilities[item].max()), 4)
        return {
            "name": name, "label": self.labels[item], "predicted": self.predicted(item), "probability": probability,
            "heldOut": self.held_out[item],
        }  # fmt: skip

    def details(self, item: int) -> dict[str, Any]:
        """Return an image, its most probable classes, and the nearest training images by the cosine of embeddings.

        The mean embedding of the training images is subtracted, as in `label_errors.find_nearest`.
        """
        mean, directions = self._directions
        cosines = directions @ F.normalize(self.embeddings[item] - mean, dim=0)
        nearest = cosines.topk(min(NEIGHBOURS + 1, len(cosines))).indices.tolist()
        others = [row for row in nearest if self.train_keys[row] != self.keys[item]][:NEIGHBOURS]
        best = self.probabilities[item].topk(min(TOP, len(self.train.classes)))
        return {
            "picture": self._picture(self.keys[item], SIDE),
            "top": [(self.train.classes[label], value) for value, label in zip(*map(Tensor.tolist, best), strict=True)],
            "nearest": [
                {
                    "picture": self._picture(self.train_keys[row], SMALL_SIDE), "key": self.train_keys[row],
                    "label": self.train.classes[self.train.labels[row]], "cosine": round(float(cosines[row]), 3),
                }
                for row in others
            ],
        }  # fmt: skip

    @cached_property
    def _directions(self) -> tuple[Tensor, Tensor]:
        """Mean embedding of the training images, and the direction of each from there."""
        mean = self.train_embeddings.mean(0)
        return mean, F.normalize(self.train_embeddings - mean, dim=1)

    def _picture(self, key: str, side: int) -> str:
        """Return an image of at most `side` pixels as a data URI; empty if its file is missing or damaged."""
        if key.isdecimal():
            return data_uri(self.train.take(torch.tensor([self.train_keys.index(key)]))[0], side)
        try:
            height, width = image_size(key)
            scale = min(1.0, side / max(height, width))
            size = max(1, round(height * scale)), max(1, round(width * scale))
            return data_uri(torch.from_numpy(decode(key, size, 3, "squash")), side)
        except DecodeError:
            return ""
