"""Rejection of images that resemble none of the classes.

An image is rejected by its energy, -T · logsumexp(logits / T) with T = 1 (W. Liu et al., Energy-based
Out-of-distribution Detection, NeurIPS 2020). It needs only the logits. results/lab-notebook.md compares it with other
scores. A model stores the scores that 2 % and 20 % of new images are expected to exceed. For other rates, the score is
linear in the square root of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.inference.sets import MIN_HELD_OUT

STORED_RATES = (0.02, 0.2)
MAX_RATE = 0.5
FALSE_ALARMS = 0.05  # default rate


def novelty(logits: Tensor) -> Tensor:
    """Return the energy, float32 (B,), of logits (B, classes), without temperature. It is high for unknown images."""
    return -logits.float().logsumexp(1)


def reject_scores(held_out: Tensor) -> list[float] | None:
    """Return the scores that `STORED_RATES` of new images are expected to exceed.

    A new image exceeds the k-th highest of N held-out scores with probability k / (N + 1). Rates below 1 / (N + 1) are
    extrapolated.

    Args:
        held_out: scores (N,) of images that the net was not trained on. The false-alarm rate of a threshold from
            training images would be higher on new images.

    Returns:
        None if there are fewer than `MIN_HELD_OUT` images, or if a score is not finite.
    """
    if len(held_out) < MIN_HELD_OUT or not held_out.isfinite().all():
        return None
    rates = max(STORED_RATES[0], 1 / (len(held_out) + 1)), STORED_RATES[1]
    scores = np.quantile(held_out.double().numpy(), 1 - np.array(rates), method="weibull").tolist()
    return [round(threshold(scores, rate, rates), 6) for rate in STORED_RATES]


def check_rate(rate: float | None, scores: Sequence[float] | None = ()) -> None:
    """Raise UsageError for an invalid rate, and for a model without scores. None, for no rejection, is valid."""
    if rate is None:
        return
    if not 0 < rate <= MAX_RATE:
        raise UsageError(f"reject is a false-alarm rate above 0 and up to {MAX_RATE:g}, not {rate:g}: use 0.05")
    if scores is None:
        raise UsageError(f"this model cannot reject images: train it with at least {MIN_HELD_OUT} validation images")


def caveat(rate: float | None) -> str:
    """Return what a rejection can and cannot do; empty without a rate. docs/probabilities.md has measurements."""
    if rate is None:
        return ""
    return f"unknown is a hint: it marks about {100 * rate:g} % of images of the known classes, and misses many others"


def threshold(scores: Sequence[float], rate: float, rates: Sequence[float] = STORED_RATES) -> float:
    """Return the score above which an image is unknown at a valid rate, for two scores and their `rates`."""
    low, high = map(math.sqrt, rates)
    return scores[0] + (scores[1] - scores[0]) * (math.sqrt(rate) - low) / (high - low)
