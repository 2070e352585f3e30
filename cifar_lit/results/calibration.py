"""Whether probabilities can be believed: the reliability diagram's bins and the expected calibration error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15  # as in Guo et al. 2017


class Bin(NamedTuple):
    """The images whose predicted class has a probability in (low, high].

    images: how many. confidence: their mean probability. accuracy: the fraction of them that is right; both NaN of none.
    """

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def reliability(probability: Tensor, hits: Tensor, bins: int = BINS) -> list[Bin]:
    """Images by the probability of the predicted class, in bins of equal width.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is right.
    """
    places = (probability * bins).ceil().long().sub(1).clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence = torch.bincount(places, probability.double(), minlength=bins) / counts
    accuracy = torch.bincount(places, hits.double(), minlength=bins) / counts
    return [
        Bin(number / bins, (number + 1) / bins, int(count), float(mean), float(right))
        for number, (count, mean, right) in enumerate(zip(counts, confidence, accuracy, strict=True))
    ]


def expected_calibration_error(bins: list[Bin]) -> float:
    """The mean distance between probability and accuracy, in 0 … 1: Σ (images of a bin / all images) · |accuracy − confidence|.

    After C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, On Calibration of Modern Neural Networks, ICML 2017.
    """
    images = sum(found.images for found in bins)
    return sum(found.images / images * abs(found.accuracy - found.confidence) for found in bins if found.images)
