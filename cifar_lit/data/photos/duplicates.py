"""Near-duplicates: images that differ only in scale, encoding, brightness or a central crop by up to 3 %.

Candidates are neighbours after sorting the images (M. Hernández and S. Stolfo, The Merge/Purge Problem, SIGMOD 1995) by
random bits of a difference hash, other bits in each pass (M. Charikar, Similarity Estimation Techniques from Rounding
Algorithms, STOC 2002). Images with similar hashes become neighbours in some pass. Time grows with the number of images,
not of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.base.text import progress

SIDE = 9  # side of a thumbnail in pixels; it has 8×8 differences across and as many down, one bit each
HASH_BITS = 2 * (SIDE - 1) ** 2
MIN_STEP = 1.0  # smallest difference in grey levels that sets a bit; noise in plain areas is smaller
MIN_CONTRAST = 6.0  # standard deviation of a thumbnail in grey levels; plainer images all look alike
# Recall among 1,300 photos of flowers at 32 and 128 pixels (n = 300): copied, halved, encoded again 100 %; brighter by
# a fifth 99 %; cropped around the centre by 1 % 100 %, by 3 % 99 %, by 5 % 85 and 77 %, by 10 % 15 and 9 %; cut at one
# corner by 3 % 54 and 45 %. Above a correlation of 0.97, a few percent of the pairs in CIFAR-10 are false.
PASSES, NEIGHBOURS = 8, 32
MAX_BITS = 24  # different bits, of 128
MIN_CORRELATION = 0.98  # between thumbnails of near-duplicates
# In a group above both this share of the images and this number, only identical images are copies of each other.
MAX_SHARE, FEW = 0.1, 10
PAIRS = 1 << 14  # compared at once
CHUNK_BYTES = 1 << 22  # images read at once


def near_duplicates(images: np.ndarray) -> list[list[int]]:
    """Return the rows of each group of near-duplicates among uint8 images (N, H, W, C), ascending.

    Pairs that share an image are in the same group. Images with almost no contrast have no near-duplicates. In a group
    of more than a tenth of the images only identical ones count, because most images of such a data set look alike.
    """
    if len(images) < 2:
        return []
    rows, thumbnails, bits = _thumbnails(images)
    firsts = np.arange(len(rows))
    rng = np.random.default_rng(0)
    for _ in range(PASSES):
        drawn = bits.take(rng.permutation(HASH_BITS)[:64], 1)
        order = np.argsort(np.packbits(drawn, axis=1).view(">u8")[:, 0], kind="stable")
        ordered = bits[order]
        for step in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
            near = (ordered[step:] ^ ordered[:-step]).sum(1, dtype=np.uint8) <= MAX_BITS
            left, right = order[:-step][near], order[step:][near]
            is_new = firsts[left] != firsts[right]
            left, right = left[is_new], right[is_new]
            is_same = _correlations(thumbnails, left, right) >= MIN_CORRELATION
            connect(firsts, left[is_same], right[is_same])
    sizes = np.bincount(firsts)[firsts]
    copies: dict[bytes, int] = {}
    for row in np.flatnonzero(sizes > max(FEW, MAX_SHARE * len(images))).tolist():
        firsts[row] = copies.setdefault(sha256(images[rows[row]]).digest(), row)
    groups: dict[int, list[int]] = {}
    for first, row in zip(firsts.tolist(), rows.tolist(), strict=True):
        groups.setdefault(first, []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _thumbnails(images: np.ndarray) -> tuple[np.ndarray, Tensor, np.ndarray]:
    """Return row (N,), thumbnail, uint8 (N, 81, C), and hash, bool (N, 128), of each image with enough contrast."""
    rows: list[np.ndarray] = []
    thumbnails: list[Tensor] = []
    bits: list[np.ndarray] = []
    step = max(1, CHUNK_BYTES // images[0].nbytes)
    with progress("looking for near-duplicates", len(images), min_seconds=5) as advance:
        for start in range(0, len(images), step):
            part = torch.from_numpy(images[start : start + step]).permute(0, 3, 1, 2)
            small = F.adaptive_avg_pool2d(part.float(), SIDE)
            contrast = small.var((2, 3), correction=0).mean(1).sqrt()
            clear = (contrast >= MIN_CONTRAST).nonzero()[:, 0]
            small = small[clear]
            grey = small.mean(1)
            across = grey[:, :-1, 1:] - grey[:, :-1, :-1] > MIN_STEP
            down = grey[:, 1:, :-1] - grey[:, :-1, :-1] > MIN_STEP
            bits.append(torch.cat([across.flatten(1), down.flatten(1)], 1).numpy())
            rows.append(start + clear.numpy())
            thumbnails.append(small.round().to(torch.uint8).flatten(2).mT)
            advance(len(part))
    return np.concatenate(rows), torch.cat(thumbnails), np.concatenate(bits)


def _correlations(thumbnails: Tensor, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the correlation of pairs of thumbnails, with each channel centred: float32 (pairs,)."""
    parts = []
    for pairs in torch.from_numpy(np.stack((left, right), 1)).split(PAIRS):
        both = thumbnails[pairs].float()
        both -= both.mean(2, keepdim=True)
        first, second = both.flatten(2).unbind(1)
        parts.append(F.cosine_similarity(first, second))
    return torch.cat(parts).numpy()


def connect(firsts: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Join the groups of each pair of rows (left, right), int64 (pairs,), in place.

    Args:
        firsts: int64 (N,), the first row of each row's group.
    """
    while len(left):
        left, right = np.minimum(firsts[left], firsts[right]), np.maximum(firsts[left], firsts[right])
        left, right = left[left < right], right[left < right]
        np.minimum.at(firsts, right, left)
        while not np.array_equal(firsts, further := firsts[firsts]):
            firsts[:] = further


def group_files(
    paths: Sequence[str], groups: Mapping[str, str], duplicates: Sequence[Sequence[str]]
) -> np.ndarray | None:
    """Return the first row of each file's group, int64 (N,), or None if every group is a single file.

    groups: names of groups, by path. duplicates: paths of each set of near-duplicates.
    """
    copies: dict[str, int] = {}
    for number, same in enumerate(duplicates):
        copies |= dict.fromkeys(same, number)
    pairs: list[tuple[int, int]] = []  # a row, and the first row of the same group or copy
    for keys in (groups, copies):
        first_rows: dict[str | int, int] = {}
        for row, path in enumerate(paths):
            if path in keys:
                pairs.append((row, first_rows.setdefault(keys[path], row)))
    firsts = np.arange(len(paths))
    connect(firsts, *np.array(pairs, np.int64).reshape(-1, 2).T)
    if (firsts == np.arange(len(paths))).all():
        return None
    return firsts
