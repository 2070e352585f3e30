"""How far probabilities can be believed: the calibration error, and the temperature that mends it.

After C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, On Calibration of Modern Neural Networks, ICML 2017. Label smoothing makes
a net less sure than it is right: it asks for 82 % of a plain horse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cifar_lit.runs.figures import Bin
from cifar_lit.runs.model_file import MAX_TEMPERATURE

MIN_HELD_OUT = 20  # images; of fewer nothing is learned
BISECTIONS = 20  # which leave a temperature within 6e-6 of itself


def fit_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """The temperature at which held-out images have the least mean negative log-likelihood; accuracies stay as they are.

    That mean is convex in 1 / T, so the sign of its slope tells the side. A share of 1 / (N + 2) of each label is spread over all
    classes, as J. Platt did for two (1999), or a net without a mistake on few images would be sure without bounds.

    Args:
        logits: (N, classes) of images that the net was not trained on. labels: int64 (N,).

    Returns:
        It, within `MAX_TEMPERATURE` and its inverse; None of fewer than 20 images, or of logits that are not finite.
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
    """The probabilities (N, classes) of the same logits, divided by a temperature; those given are of a temperature of 1."""
    return (probabilities.log() / temperature).softmax(1)


def reliability(probability: Tensor, hits: Tensor, bins: int = 15) -> list[Bin]:
    """Images by the probability of the predicted class, in bins of equal width; 15 as in Guo et al. 2017.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is right.
    """
    places = (probability * bins).ceil().long().sub(1).clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence, accuracy = (
        torch.bincount(places, each.double(), minlength=bins) / counts for each in (probability, hits)
    )
    columns = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return [Bin(place / bins, (place + 1) / bins, *column) for place, column in enumerate(columns)]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between probability and accuracy, in 0 … 1: Σ (images of a bin / images) · |accuracy − confidence|."""
    images = sum(part.images for part in bins)
    return sum(part.images / images * abs(part.accuracy - part.confidence) for part in bins if part.images)
