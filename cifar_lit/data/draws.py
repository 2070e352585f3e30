"""Stateless random numbers: functions of a key, equal in any batch and on any device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_POINTS = 1024  # size of the quantile table of a Beta distribution


def uniform(rows: Tensor, count: int, *key: int) -> Tensor:
    """Draw numbers in [0, 1), float32 (B, count), each a function of `key`, its row and its column alone.

    The generator is counter-based (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011), with rows and
    columns as counters. The finaliser of MurmurHash3 (Appleby, 2011) mixes each counter with a word of the key. The
    words have 32 bits and are stored as int64.

    Args:
        rows: int64 (B,), in 0 … 2³² - 1.
        count: numbers per row.
        key: non-negative integers, such as seed, epoch and purpose.
    """
    row_word, column_word = _words(key)
    columns = torch.arange(count, device=rows.device)
    words = _mix(_mix(rows ^ row_word)[:, None] ^ _mix(columns ^ column_word))
    return (words >> 8).float() * 2.0**-24  # a float32 holds 24 bits


def beta(draws: Tensor, alpha: float) -> Tensor:
    """Transform uniform draws to the Beta(alpha, alpha) distribution, by its quantile function."""
    quantiles = _beta_quantiles(alpha, draws.device)
    positions = draws * _POINTS
    below = positions.long()
    return torch.lerp(quantiles[below], quantiles[below + 1], positions - below)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ (words >> 16)) * 0x85EBCA6B & _WORD  # int64 overflow does not reach the low 32 bits
    words = (words ^ (words >> 13)) * 0xC2B2AE35 & _WORD
    return words ^ (words >> 16)


@lru_cache
def _words(key: tuple[int, ...]) -> tuple[int, int]:
    first, second = np.random.SeedSequence(key).generate_state(2)
    return int(first), int(second)


@lru_cache
def _beta_quantiles(alpha: float, device: torch.device) -> Tensor:
    """Return the quantiles of Beta(alpha, alpha) at 0, 1/_POINTS, … 1, float32.

    If alpha < 1, the lower half is integrated over x^alpha, because the density has a pole at 0. The upper half mirrors
    the lower half.
    """
    power = min(alpha, 1.0)
    x = np.linspace(0, 0.5**power, 100_001) ** (1 / power)
    density = x ** (alpha - power) * (1 - x) ** (alpha - 1)
    mass = np.concatenate(([0], np.cumsum(density[1:] + density[:-1])))
    lower = np.interp(np.linspace(0, 0.5, _POINTS // 2 + 1), mass / mass[-1] / 2, x)
    return torch.from_numpy(np.concatenate((lower, 1 - lower[-2::-1]))).float().to(device)
