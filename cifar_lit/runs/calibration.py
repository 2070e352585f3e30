"""Calibration error of probabilities (C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cifar_lit.runs.figures import Bin


def reliability(probability: Tensor, hits: Tensor, bins: int = 15) -> list[Bin]:
    """Return bins of equal width over the probability of the predicted class.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is correct.
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
    error = 0.0
    for part in bins:
        if part.images:
            error += part.images / images * abs(part.accuracy - part.confidence)
    return error
