"""Select the unlabelled images to label next: images that a net is unsure of, and that differ from each other.

A k-means of the embeddings of all images has one cluster for each image to select. The weight of an image is its
uncertainty: 1 minus the difference between its two largest probabilities. Of each cluster, the image nearest to the
centre is selected (F. Zhdanov, Diverse mini-batch Active Learning, 2019, with all images as candidates).
`results/cpu/next-labels.json` compares this with random choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.inference.classify import ImageFile, classify_files
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.inference.load import Classifier
from cifar_lit.runs.predictions import Row

ROUNDS = 10  # k-means iterations


class Selection(NamedTuple):
    """The selected images of a pool, the most uncertain first, and the numbers of files that were left out."""

    rows: list[Row]
    unreadable: int
    labelled: int
    repeated: int


def next_images(
    classifier: Classifier,
    files: Sequence[ImageFile],
    count: int,
    advance: Callable[[int], None],
    labelled: Set[bytes] = frozenset(),
    reviewed: Set[str] = frozenset(),
) -> Selection:
    """Select at most `count` of the files. Files with equal pixels, at the size of the net, count as one.

    Args:
        classifier: the net.
        files: the pool. The memory needed grows by the embedding of each file, in float16.
        count: number of images to select.
        advance: callback with the number of files processed since the last call.
        labelled: digests of images to leave out.
        reviewed: absolute paths to leave out.
    """
    pool: list[Row] = []
    embeddings: list[Tensor] = []
    pool_digests: set[bytes] = set()
    unreadable = excluded = repeated = 0
    for rows, images in classify_files(classifier, files, top=2):
        unreadable += len(rows) - len(images)
        pixels = images.permute(0, 2, 3, 1)
        readable = (row for row in rows if row.error is None)
        new = []
        for place, (row, digest) in enumerate(zip(readable, digests(pixels), strict=True)):
            if digest in labelled or os.path.normpath(Path(row.path or "").absolute()) in reviewed:
                excluded += 1
            elif digest in pool_digests:
                repeated += 1
            else:
                pool_digests.add(digest)
                new.append(place)
                pool.append(row)
        if new:
            _, parts = logits_and_embeddings(classifier, pixels.__getitem__, torch.tensor(new), lambda number: None)
            embeddings.append(parts.half())
        advance(len(rows))
    selected = select(torch.tensor([margin_of(row) for row in pool]), torch.cat(embeddings), count) if pool else ()
    return Selection([pool[place] for place in map(int, selected)], unreadable, excluded, repeated)


def digests(images: Tensor) -> list[bytes]:
    """Return a hash of the pixels of each image, uint8 (N, H, W, C)."""
    return [sha256(image.tobytes()).digest() for image in images.numpy()]


def margin_of(row: Row) -> float:
    """Return the difference between the two largest probabilities of an image."""
    return row.top[0][1] - row.top[1][1]


def select(margins: Tensor, embeddings: Tensor, count: int) -> Tensor:
    """Return the rows of the images to label next, int64 (at most `count`,), the smallest margin first.

    Args:
        margins: difference between the two largest probabilities of each image, float (N,).
        embeddings: float (N, features).
        count: number of images to select.
    """
    if len(margins) <= count:
        return margins.argsort(stable=True)
    points = embeddings.float()
    points = F.normalize(points - points.mean(0), dim=1)
    weights = (1 - margins.float()).clamp_min(1e-6)
    generator = torch.Generator().manual_seed(0)
    first = [int(weights.argmax())]  # the other first centres are drawn as in k-means++
    distances = torch.full_like(weights, torch.inf)
    while len(first) < count:
        distances = distances.minimum((points - points[first[-1]]).square().sum(1))
        distances[first] = 1e-12
        first.append(int(torch.multinomial(weights * distances, 1, generator=generator)))
    centres = points[first]
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points * weights[:, None])
        totals = torch.zeros(count).index_add_(0, nearest, weights)[:, None]
        centres = torch.where(totals > 0, sums / totals, centres)
    distances = torch.cdist(points, centres)
    chosen = []
    for column in distances.T:  # each centre takes the nearest image that is left
        chosen.append(int(column.argmin()))
        distances[chosen[-1]] = torch.inf
    rows = torch.tensor(chosen)
    return rows[margins[rows].argsort(stable=True)]
