"""The split of training images into train and validation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cifar_lit.errors import UsageError


def split_validation(labels: Tensor, val_size: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the train and the validation part, both int64 in ascending order.

    labels: int64 (N,). val_size: a number of images when 1 or more, else a fraction of them. Every class gives its
    proportional share (largest remainders first), chosen as a function of `seed`.

    Raises UsageError when the part is negative or leaves nothing to train on.
    """
    count = len(labels)
    wanted = round(val_size * count) if val_size < 1 else int(val_size)
    if val_size < 0 or wanted >= count:
        raise UsageError(f"data.val_size {val_size:g} must leave some of the {count} images to train on")
    if val_size > 0 and wanted == 0:
        raise UsageError(f"data.val_size {val_size:g} of {count} images is none: raise it, or use 0 to train on all")
    classes, counts = np.unique(labels.numpy(), return_counts=True)
    exact = counts * (wanted / count)
    share = np.floor(exact).astype(int)
    for position in np.argsort(share - exact, kind="stable")[: wanted - share.sum()]:
        share[position] += 1
    rng = np.random.default_rng(seed)
    validation = np.zeros(count, dtype=bool)
    for label, size in zip(classes, share, strict=True):
        members = np.flatnonzero(labels.numpy() == label)
        validation[rng.permutation(members)[:size]] = True
    return torch.from_numpy(np.flatnonzero(~validation)), torch.from_numpy(np.flatnonzero(validation))


def channel_statistics(images: Tensor, indices: Tensor, most: int = 50_000) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel over the chosen images, in [0, 1] units, rounded to 4 digits.

    images: uint8 (N, H, W, C); at most the first `most` chosen ones are read.
    """
    channels = images.shape[3]
    total = torch.zeros(channels, dtype=torch.float64)
    squares = torch.zeros(channels, dtype=torch.float64)
    pixels = 0
    for part in indices[:most].split(2048):
        values = images.index_select(0, part).view(-1, channels).float() / 255.0
        total += values.sum(0)
        squares += values.square().sum(0)
        pixels += len(values)
    mean = total / pixels
    std = (squares / pixels - mean.square()).clamp_min(1e-6).sqrt()
    return [round(x, 4) for x in mean.tolist()], [max(round(x, 4), 1e-3) for x in std.tolist()]
