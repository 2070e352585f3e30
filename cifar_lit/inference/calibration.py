"""The temperature, which makes probabilities honest on average, and the error of probabilities.

It follows C. Guo et al. (On Calibration of Modern Neural Networks, ICML 2017). A net trained with label smoothing is
underconfident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.inference.model_file import MAX_TEMPERATURE
from cifar_lit.inference.sets import MIN_HELD_OUT

BISECTIONS = 20  # relative error of the temperature: 6e-6
FOLDS = 5
BINS = 15
DRAWS = 2000
PRESET = "model.temperature"


def tempered(probabilities: Tensor, temperature: float | None) -> Tensor:
    """Return the probabilities (N, classes) of temperature 1 at another temperature; None leaves them as they are."""
    if temperature is None:
        return probabilities
    return (probabilities.log() / temperature).softmax(1)


def choose_temperature(logits: Tensor, labels: Tensor, preset: float | None) -> tuple[float | None, str]:
    """Return a temperature for held-out images, and where it comes from.

    The fitted one is used if temperatures fitted on four fifths of the images improve the log loss and the Brier score
    of the other fifth. The log loss alone prefers a high temperature if a few labels are wrong: an image that is wrong
    with probability 1 costs up to 30 nats, and at most 2 in the Brier score.

    Args:
        logits: (N, classes) of images that the net was not trained on.
        labels: int64 (N,).
        preset: temperature to use instead; None for 1. It is used for fewer than 20 images or non-finite logits, too.
    """
    if len(labels) < MIN_HELD_OUT or not logits.isfinite().all():
        return preset, PRESET if preset else ""
    images = f"{len(labels):,} validation images"
    folds = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)) % FOLDS
    temperatures = torch.empty(len(labels), 1)
    for fold in range(FOLDS):
        is_out = folds == fold
        temperatures[is_out] = fit_temperature(logits[~is_out], labels[~is_out])
    before = preset or 1.0
    if (_losses(logits / temperatures, labels) < _losses(logits / before, labels)).all():
        return fit_temperature(logits, labels), f"fitted on {images}"
    name = "1" if preset is None else PRESET
    return before, f"{name}, because one fitted on {images} does not improve left-out images"


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log loss and Brier score, means over images."""
    probabilities = logits.softmax(1)
    brier = (probabilities - F.one_hot(labels, logits.shape[1])).square().sum(1).mean()
    return torch.stack([F.cross_entropy(logits, labels), brier])


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature with the smallest log loss, in 1/20 … 20.

    The loss is convex in 1 / T, so bisection on the sign of its slope finds the minimum. Labels are smoothed by
    1 / (N + 2), as by J. Platt for two classes (1999). Otherwise a net without mistakes on few images would become
    arbitrarily confident.

    Args:
        logits: (N, classes) of images that the net was not trained on.
        labels: int64 (N,).
    """
    logits = logits.double()
    targets = torch.lerp(logits.gather(1, labels[:, None])[:, 0], logits.mean(1), 1 / (len(labels) + 2))
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


def reliability(probability: Tensor, hits: Tensor) -> list[Bin]:
    """Return bins of equal width over the probability of the predicted class.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is correct.
    """
    indices = _bin_indices(probability)
    counts = torch.bincount(indices, minlength=BINS)
    confidence = torch.bincount(indices, probability.double(), minlength=BINS) / counts
    accuracy = torch.bincount(indices, hits.double(), minlength=BINS) / counts
    columns = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return [Bin(index / BINS, (index + 1) / BINS, *column) for index, column in enumerate(columns)]


def _bin_indices(probability: Tensor) -> Tensor:
    return (probability.double() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)


def perfect_error(probability: Tensor) -> dict[str, float]:
    """Return the expected calibration error that a perfectly calibrated net shows on as many images.

    It is above 0 by chance. The predictions are drawn as correct with these probabilities, `DRAWS` times.

    Args:
        probability: of the predicted class, float (N,) in 0 … 1.

    Returns:
        `mean`, and `high`, which 5 % of the draws exceed.
    """
    indices = _bin_indices(probability).numpy()
    shares = probability.double().numpy()
    generator = np.random.default_rng(0)
    errors = np.empty(DRAWS)
    for draw in range(DRAWS):
        hits = generator.random(len(shares)) < shares
        errors[draw] = np.abs(np.bincount(indices, hits - shares, minlength=BINS)).sum() / len(shares)
    return {"mean": round(float(errors.mean()), 6), "high": round(float(np.quantile(errors, 0.95)), 6)}


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return Σ (images of a bin / images) · |accuracy − confidence|, in 0 … 1 (C. Guo et al., ICML 2017)."""
    filled = [part for part in bins if part.images]
    error = sum(part.images * abs(part.accuracy - part.confidence) for part in filled)
    return error / sum(part.images for part in filled)
