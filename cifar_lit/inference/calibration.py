"""The temperature, which makes probabilities honest on average, and the error of probabilities.

It follows C. Guo et al. (On Calibration of Modern Neural Networks, ICML 2017). A net trained with label smoothing is
underconfident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cifar_lit.inference.model_file import MAX_TEMPERATURE
from cifar_lit.inference.sets import MIN_HELD_OUT

BISECTIONS = 20  # relative error of the temperature: 6e-6


def tempered(probabilities: Tensor, temperature: float | None) -> Tensor:
    """Return the probabilities (N, classes) of temperature 1 at another temperature; None leaves them as they are."""
    if temperature is None:
        return probabilities
    return (probabilities.log() / temperature).softmax(1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """Return the temperature with the smallest mean negative log-likelihood on held-out images.

    The mean is convex in 1 / T, so bisection on the sign of its slope finds the minimum. Labels are smoothed by
    1 / (N + 2), as by J. Platt for two classes (1999). Otherwise a net without mistakes on few images would become
    arbitrarily confident.

    Args:
        logits: (N, classes) of images that the net was not trained on.
        labels: int64 (N,).

    Returns:
        The temperature in 1/20 … 20; None for fewer than 20 images or non-finite logits.
    """
    count, logits = len(labels), logits.double()
    if count < MIN_HELD_OUT or not logits.isfinite().all():
        return None
    targets = torch.lerp(logits.gather(1, labels[:, None])[:, 0], logits.mean(1), 1 / (count + 2))
    low, high = -math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        slope = ((logits / math.exp(middle)).softmax(1) * logits).sum(1).mean() - targets.mean()
        if slope > 0:
            low = middle
        else:
            high = middle
    return round(math.exp((low + high) / 2), 6)


class Bin(NamedTuple):
    """Images whose predicted class has a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float  # mean probability, NaN for an empty bin
    accuracy: float  # NaN for an empty bin


def reliability(probability: Tensor, hits: Tensor, bins: int = 15) -> list[Bin]:
    """Return bins of equal width over the probability of the predicted class.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is correct.
    """
    indices = (probability.double() * bins).ceil().long().sub(1).clamp(0, bins - 1)
    counts = torch.bincount(indices, minlength=bins)
    confidence = torch.bincount(indices, probability.double(), minlength=bins) / counts
    accuracy = torch.bincount(indices, hits.double(), minlength=bins) / counts
    columns = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return [Bin(index / bins, (index + 1) / bins, *column) for index, column in enumerate(columns)]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return Σ (images of a bin / images) · |accuracy − confidence|, in 0 … 1 (C. Guo et al., ICML 2017)."""
    images = sum(part.images for part in bins)
    error = 0.0
    for part in bins:
        if part.images:
            error += part.images / images * abs(part.accuracy - part.confidence)
    return error
