"""Out-of-distribution detection by the energy of the logits.

The score is -T · logsumexp(logits / T) with T = 1 (W. Liu et al., Energy-based Out-of-distribution Detection, NeurIPS
2020). It needs only the logits. `results/cpu/scores.json` compares it with other scores for the recipe `laptop`. A
score from embeddings, the distance to training images times the perplexity, did not separate CIFAR-100 from CIFAR-10
better.
"""

from __future__ import annotations

import math

from torch import Tensor

FALSE_ALARMS = 0.05  # fraction of the held-out images above the threshold
MIN_HELD_OUT = 20  # 5 % of fewer images is less than one image


def novelty(logits: Tensor) -> Tensor:
    """Return the energy, float32 (B,), of logits (B, classes), without temperature. Outliers have a high energy."""
    return -logits.float().logsumexp(1)


def novelty_threshold(held_out: Tensor) -> float | None:
    """Return the novelty that 5 % of the held-out images exceed.

    Args:
        held_out: logits (N, classes) of images that the net was not trained on. More than 5 % of new images would
            exceed a threshold from training images.

    Returns:
        None if there are fewer than `MIN_HELD_OUT` images, or if the threshold is not finite.
    """
    if len(held_out) < MIN_HELD_OUT:
        return None
    threshold = float(novelty(held_out).quantile(1 - FALSE_ALARMS))
    return round(threshold, 6) if math.isfinite(threshold) else None
