"""Stateless random numbers: functions of a key, equal in any batch and on any device.

The generator is counter-based (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011). The finaliser of
MurmurHash3 (Appleby, 2011) mixes each counter with a word of the key. The words have 32 bits and are stored as int64.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # all bits of a word


def uniform(rows: Tensor, count: int, stream: str, seed: int, epoch: int) -> Tensor:
    """Draw numbers in [0, 1), float32 (B, count), each a function of the other arguments, its row and its column alone.

    Args:
        rows: int64 (B,), in 0 … 2³² - 1.
        count: numbers per row.
        stream: name of what is drawn. Streams are independent.
    """
    row_word, column_word = key_words(stream, seed, epoch)
    columns = torch.arange(count, device=rows.device)
    words = _mix(_mix(rows ^ row_word)[:, None] ^ _mix(columns ^ column_word))
    return (words >> 8).float() * 2.0**-24  # a float32 holds 24 bits


def integers(rows: Tensor, keys: Tensor) -> Tensor:
    """Draw whole numbers, int64 (B, n), each a function of its row and its column of `keys`. CUDA graphs can replay it.

    Args:
        rows: int64 (B,), in 0 … 2³² - 1.
        keys: int64 (4, n): for each number two words, the count of possible values, and the lowest value.
    """
    first, second, counts, lowest = keys.unbind()
    words = _mix(rows[:, None] ^ first) ^ second
    return (words * counts >> 32) + lowest


def beta(draws: Tensor, angles: Tensor, alpha: float) -> Tensor:
    """Transform two uniform draws to the Beta(alpha, alpha) distribution (Devroye, 1996).

    With Student's t of 2·alpha degrees of freedom (Bailey, 1994), it is that of (1 + t / √(2·alpha + t²)) / 2.
    """
    t = torch.expm1(-draws.log() / alpha).sqrt() * (2 * math.pi * angles).cos()  # divided by √(2·alpha)
    return (1 + t.atan().sin()) / 2


@lru_cache
def key_words(stream: str, seed: int, epoch: int) -> tuple[int, int]:
    """Return two words of a key. Arguments: see `uniform`."""
    first, second = np.random.SeedSequence((seed, epoch, int.from_bytes(stream.encode()))).generate_state(2)
    return int(first), int(second)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ (words >> 16)) * 0x85EBCA6B & WORD  # int64 overflow does not reach the low 32 bits
    words = (words ^ (words >> 13)) * 0xC2B2AE35 & WORD
    return words ^ (words >> 16)
