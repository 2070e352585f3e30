"""Calibration error of probabilities, and the temperature that reduces it.

Both follow C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, On Calibration of Modern Neural Networks, ICML 2017. A net
trained with label smoothing is underconfident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cifar_lit.runs.figures import Bin
from cifar_lit.runs.model_file import MAX_TEMPERATURE

MIN_HELD_OUT = 20  # images needed to fit a temperature
BISECTIONS = 20  # relative error of the temperature: 6e-6


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
        low, high = (middle, high) if slope > 0 else (low, middle)
    return round(math.exp((low + high) / 2), 6)


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Return the probabilities (N, classes) of temperature 1 at another temperature."""
    return (probabilities.log() / temperature).softmax(1)


def reliability(probability: Tensor, hits: Tensor, bins: int = 15) -> list[Bin]:
    """Return bins of equal width over the probability of the predicted class.

    Args:
        probability: float (N,) in 0 … 1.
        hits: bool (N,), whether the prediction is correct.
        bins: number of bins.
    """
    indices = (probability * bins).ceil().long().sub(1).clamp(0, bins - 1)
    counts = torch.bincount(indices, minlength=bins)
    confidence = torch.bincount(indices, probability.double(), minlength=bins) / counts
    accuracy = torch.bincount(indices, hits.double(), minlength=bins) / counts
    columns = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return [Bin(index / bins, (index + 1) / bins, *column) for index, column in enumerate(columns)]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return Σ (images of a bin / images) · |accuracy − confidence|, in 0 … 1."""
    images = sum(part.images for part in bins)
    return sum(part.images / images * abs(part.accuracy - part.confidence) for part in bins if part.images)
