"""Near-duplicates: pictures that are the same but for scaling, encoding, a slight crop or brightness.

Candidates are neighbours when the pictures are sorted (M. Hernández and S. Stolfo, The Merge/Purge Problem, SIGMOD 1995) by some
bits of a difference hash, other bits in each pass (M. Charikar, Similarity Estimation Techniques from Rounding Algorithms, STOC
2002). Pictures whose hashes differ in a few bits meet in one pass or another; time grows with the images, not with their pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from cifar_lit.data.progress import progress
from cifar_lit.data.splits import connect

SIDE = 9  # of the thumbnails; between them lie 8×8 differences across and as many down, a bit each
HASH_BITS = 2 * (SIDE - 1) ** 2
MIN_STEP = 1.0  # grey levels of a difference that counts, so that noise in plain areas makes no bits
MIN_CONTRAST = 6.0  # grey levels, the standard deviation of a thumbnail: plainer pictures all look alike
# Of 3,000 photos that were scaled, brightened, cropped by 3 % and encoded anew, 99.6 % were found among 60,000 images of
# CIFAR-10, 98.3 % among a million mixtures of these. Of CIFAR-10's own pairs above 0.97, a few in a hundred are not one picture.
PASSES, NEIGHBOURS = 8, 32
MAX_BITS = 24  # of the 128, that differ
MIN_CORRELATION = 0.98  # of the thumbnails
MAX_SHARE, FEW = 0.1, 10  # more of the images than this share or number say that all pictures of this kind look so
AT_ONCE_BYTES = 1 << 22  # of images
PAIRS_AT_ONCE = 1 << 14

_ONES = np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1).sum(
    1, dtype=np.uint8
)  # by word


def near_duplicates(images: np.ndarray) -> list[list[int]]:
    """The rows of each group of near-duplicates among uint8 images (N, H, W, C), ascending.

    A group holds whatever is connected by pairs. Pictures of next to no contrast have no near-duplicates. A group of more than a
    tenth of the images is none: such a likeness is that of the kind, as of parts on a conveyor belt.
    """
    if len(images) < 2:
        return []
    rows, thumbnails, words = _thumbnails(images)
    firsts = np.arange(len(rows))
    rng = np.random.default_rng(0)
    for _ in range(PASSES):
        key = np.zeros(len(rows), np.uint64)
        for bit in rng.permutation(HASH_BITS)[:64].tolist():
            key <<= np.uint64(1)
            key |= words[bit // 16] >> np.uint16(bit % 16) & np.uint16(1)
        order = np.argsort(key, kind="stable")
        ordered = words[:, order]
        for step in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
            near = _ONES[ordered[:, step:] ^ ordered[:, :-step]].sum(0, dtype=np.uint8) <= MAX_BITS
            left, right = order[:-step][near], order[step:][near]
            apart = firsts[left] != firsts[right]
            left, right = left[apart], right[apart]
            alike = _correlations(thumbnails, left, right) >= MIN_CORRELATION
            connect(firsts, left[alike], right[alike])
    counts = np.bincount(firsts, minlength=len(rows))
    together = np.flatnonzero((counts[firsts] > 1) & (counts[firsts] <= max(FEW, MAX_SHARE * len(images))))
    groups: dict[int, list[int]] = {}
    for first, row in zip(firsts[together].tolist(), rows[together].tolist(), strict=True):
        groups.setdefault(first, []).append(row)
    return list(groups.values())


def _thumbnails(images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each image with enough contrast its row (N,), thumbnail, uint8 (N, 81, C), and hash, uint16 (8, N).

    They are written where they stay: of a million images their parts beside the whole would take half a gigabyte more.
    """
    rows = np.empty(len(images), np.int64)
    thumbnails = np.empty((len(images), SIDE * SIDE, images.shape[3]), np.uint8)
    words = np.empty((HASH_BITS // 16, len(images)), np.uint16)
    count = 0
    step = max(1, AT_ONCE_BYTES // images[0].nbytes)
    with progress("looking for near-duplicates", len(images), min_seconds=5) as advance:
        for start in range(0, len(images), step):
            part = torch.from_numpy(images[start : start + step]).permute(0, 3, 1, 2)
            small = F.adaptive_avg_pool2d(part.float(), SIDE)
            contrast = small.var((2, 3), correction=0).mean(1).sqrt()
            chosen = (contrast >= MIN_CONTRAST).nonzero()[:, 0]
            small = small[chosen]
            grey = small.mean(1)
            across = grey[:, :-1, 1:] - grey[:, :-1, :-1] > MIN_STEP
            down = grey[:, 1:, :-1] - grey[:, :-1, :-1] > MIN_STEP
            bits = torch.cat([across.flatten(1), down.flatten(1)], 1).numpy()
            new = slice(count, count + len(chosen))
            rows[new] = start + chosen.numpy()
            thumbnails[new] = small.round().to(torch.uint8).flatten(2).mT.numpy()
            words[:, new] = np.packbits(bits, axis=1, bitorder="little").view("<u2").T
            count += len(chosen)
            advance(len(part))
    return rows[:count], thumbnails[:count], words[:, :count]


def _correlations(thumbnails: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of pairs of thumbnails, each channel around its own mean; float32 (pairs,)."""
    result = np.empty(len(left), np.float32)
    for start in range(0, len(left), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        one, other = (thumbnails[rows[part]].astype(np.float32) for rows in (left, right))
        one, other = one - one.mean(1, keepdims=True), other - other.mean(1, keepdims=True)
        squares = np.square(one).sum((1, 2)) * np.square(other).sum((1, 2))
        result[part] = (one * other).sum((1, 2)) / np.sqrt(squares)
    return result
