"""Prediction sets: sets of classes that contain the true class with a stated probability.

They follow split conformal prediction (V. Vovk, A. Gammerman and G. Shafer, 2005), and have the stated coverage for new
images like the held-out ones, whatever the net. The score of a class is the probability of all others (LAC: M. Sadinle,
J. Lei and L. Wasserman, Least Ambiguous Set-Valued Classifiers, JASA 2019). These sets are the smallest on average, and
may be empty for an image without a probable class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from cifar_lit.base.errors import UsageError

MIN_HELD_OUT = 20  # images; 5 % of fewer is less than one
LEVELS = (0.8, 0.9, 0.95, 0.99)  # coverages that a test measures
Scores = Mapping[str, Sequence[Sequence[float]]]  # a list for each class, as `lac`


def held_out_scores(probabilities: Tensor, labels: Tensor) -> dict[str, list[list[float]]] | None:
    """Return the ascending scores of the true classes of held-out images: a list for each class, as `lac`.

    probabilities: (N, classes), at the temperature. labels: int64 (N,). None for fewer than `MIN_HELD_OUT` images, or
    values that are not finite.
    """
    if len(labels) < MIN_HELD_OUT or not probabilities.isfinite().all():
        return None
    own = 1 - probabilities.gather(1, labels[:, None])[:, 0]
    scores = []
    for label in range(probabilities.shape[1]):
        values = own[labels == label].sort().values.tolist()
        # Rounded up: sets with a limit of 0 would be empty for a confident net.
        scores.append([math.ceil(value * 1e6) / 1e6 for value in values])
    return {"lac": scores}


def set_limit(scores: Scores | None, rate: float) -> float:
    """Return the highest score of a class in a prediction set.

    It is the k-th smallest of N held-out scores with k = ⌈rate · (N + 1)⌉: a new score is at most that with a
    probability of at least `rate`.

    Args:
        scores: result of `held_out_scores`.
        rate: coverage, the probability that a set contains the true class, above 0 and below 1.

    Raises:
        UsageError: the coverage is invalid, or needs more held-out images.
    """
    if not 0 < rate < 1:
        raise UsageError(f"coverage is a probability above 0 and below 1, not {rate:g}: use 0.95")
    if scores is None:
        raise UsageError(f"this model has no prediction sets: train it with {MIN_HELD_OUT} or more validation images")
    values = sorted(score for of_class in scores["lac"] for score in of_class)
    rank = math.ceil(rate * (len(values) + 1) - 1e-9)  # the product may be rounded up
    if rank > len(values):
        needed = math.ceil(rate / (1 - rate) * (1 - 1e-9))
        counts = f"{needed:,} held-out images, and there are {len(values):,}"
        raise UsageError(f"coverage {rate:g} needs {counts}: train with a larger data.val_size, or lower the coverage")
    return values[rank - 1]


def check_coverage(rate: float | None, scores: Scores | None) -> None:
    """Raise UsageError for a coverage that is invalid or needs more held-out images. None, for no sets, is valid."""
    if rate is not None:
        set_limit(scores, rate)


def prediction_sets(probabilities: Tensor, limit: float) -> Tensor:
    """Return whether each class is in the set, bool (N, classes). limit: result of `set_limit`."""
    return 1 - probabilities <= limit


def measured_coverage(probabilities: Tensor, labels: Tensor, scores: Scores | None) -> list[dict[str, float]]:
    """Return how often the sets of test images contain the true class, for each of `LEVELS` that can be reached.

    Args:
        probabilities: (N, classes), at the temperature.
        labels: int64 (N,).
        scores: result of `held_out_scores` for other images.

    Returns:
        `coverage` (requested), `measured`, and `set_size` (mean number of classes).
    """
    results = []
    for level in LEVELS:
        with suppress(UsageError):  # too few held-out images
            sets = prediction_sets(probabilities, set_limit(scores, level))
            covered = sets.gather(1, labels[:, None]).double().mean()
            size = sets.sum(1).double().mean()
            results.append({"coverage": level, "measured": round(float(covered), 6), "set_size": round(float(size), 6)})
    return results
