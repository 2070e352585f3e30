"""Random numbers as a function of what they are for: without a generator's state, the same in any batch and on any device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_POINTS = 1024  # of the table of a Beta distribution


def uniform(rows: Tensor, count: int, *key: int) -> Tensor:
    """Numbers in [0, 1) for each row: float32 (B, count), where each is a function of `key`, its row and its column alone.

    rows: int64 (B,) in 0 … 2³² - 1. key: whole numbers that are not negative, such as a seed, an epoch and one for the purpose.

    Counter-based (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011): rows and columns are counters, each mixed
    with a word of the key by the finaliser of MurmurHash3 (Appleby, 2011), in 32 bits held in int64.
    """
    of_rows, of_columns = _words(key)
    columns = torch.arange(count, device=rows.device)
    words = _mix(_mix(rows ^ of_rows)[:, None] ^ _mix(columns ^ of_columns))
    return (words >> 8).float() * 2.0**-24  # as many bits as a float32 keeps


def beta(draws: Tensor, alpha: float) -> Tensor:
    """Numbers of the Beta(alpha, alpha) distribution, of the shape of uniform `draws`, by the inverse of its distribution."""
    quantiles = _beta_quantiles(alpha, draws.device)
    places = draws * _POINTS
    below = places.long()
    return torch.lerp(quantiles[below], quantiles[below + 1], places - below)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ (words >> 16)) * 0x85EBCA6B & _WORD  # what overflows is beyond the 32 bits that are kept
    words = (words ^ (words >> 13)) * 0xC2B2AE35 & _WORD
    return words ^ (words >> 16)


@lru_cache
def _words(key: tuple[int, ...]) -> tuple[int, int]:
    first, second = np.random.SeedSequence(key).generate_state(2)
    return int(first), int(second)


@lru_cache
def _beta_quantiles(alpha: float, device: torch.device) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at 0, 1/_POINTS, … 1, float32.

    The lower half is integrated over s = x^alpha, in which the density has no pole at 0, or over x where it has none anyway; the
    upper half mirrors it.
    """
    power = min(alpha, 1.0)
    x = np.linspace(0, 0.5**power, 100_001) ** (1 / power)
    density = x ** (alpha - power) * (1 - x) ** (alpha - 1)
    mass = np.concatenate(([0], np.cumsum(density[1:] + density[:-1])))
    lower = np.interp(np.linspace(0, 0.5, _POINTS // 2 + 1), mass / mass[-1] / 2, x)
    return torch.from_numpy(np.concatenate((lower, 1 - lower[-2::-1]))).float().to(device)
