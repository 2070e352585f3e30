"""Prediction sets: sets of classes that contain the true class with a stated probability.

They follow split conformal prediction (V. Vovk, A. Gammerman and G. Shafer, 2005), and have the stated coverage for new
images like the held-out ones, whatever the net. The score of a class is the probability of all others (LAC: M. Sadinle,
J. Lei and L. Wasserman, Least Ambiguous Set-Valued Classifiers, JASA 2019). These sets are the smallest on average, and
may be empty for an image without a probable class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError

if TYPE_CHECKING:
    from jsonargparse import Namespace

MIN_HELD_OUT = 20  # images; 5 % of fewer is less than one
LEVELS = (0.8, 0.9, 0.95, 0.99)  # coverages that a test measures
Scores = Mapping[str, Sequence[Sequence[float]]]  # a list for each class, as `lac`


class Coverage(NamedTuple):
    """Prediction sets to return.

    rate: probability that a set contains the true class, above 0 and below 1.
    by_class: reach the rate for the images of each class, instead of for all images together.
    """

    rate: float
    by_class: bool = False


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


def set_limits(scores: Scores | None, coverage: Coverage) -> Tensor:
    """Return the highest score of a class in a prediction set, float32 (classes,).

    It is the k-th smallest of N held-out scores with k = ⌈rate · (N + 1)⌉: a new score is at most that with a
    probability of at least `rate`. All classes have the same limit unless `by_class`.

    Args:
        scores: result of `held_out_scores`.

    Raises:
        UsageError: the coverage is invalid, or needs more held-out images.
    """
    rate = coverage.rate
    if not 0 < rate < 1:
        raise UsageError(f"coverage is a probability above 0 and below 1, not {rate:g}: use 0.95")
    if scores is None:
        raise UsageError(f"this model has no prediction sets: train it with {MIN_HELD_OUT} or more validation images")
    by_class = scores["lac"]
    parts: Sequence[Sequence[float]] = [[score for each in by_class for score in each]]
    if coverage.by_class:
        parts = by_class
    limits = []
    for values in parts:
        rank = math.ceil(rate * (len(values) + 1) - 1e-9)  # the product may be rounded up
        if rank > len(values):
            images = "held-out images"
            if coverage.by_class:
                images += " of each class"
            needed = math.ceil(rate / (1 - rate) * (1 - 1e-9))
            remedy = "train with a larger data.val_size, or lower the coverage"
            raise UsageError(f"coverage {rate:g} needs {needed:,} {images}, and there are {len(values):,}: {remedy}")
        limits.append(sorted(values)[rank - 1])
    return torch.tensor(limits).expand(len(by_class))


def requested_sets(settings: Namespace, scores: Scores | None) -> Coverage | None:
    """Return the sets that a command line requests (see `base.command_line.add_coverage`), None without --coverage.

    Raise UsageError if the held-out scores are too few for them.
    """
    if settings.coverage is None:
        if settings.by_class:
            raise UsageError("--by-class describes prediction sets: add --coverage 0.95")
        return None
    coverage = Coverage(settings.coverage, settings.by_class)
    set_limits(scores, coverage)
    return coverage


def prediction_sets(probabilities: Tensor, limits: Tensor) -> Tensor:
    """Return whether each class is in the set, bool (N, classes). limits: result of `set_limits`."""
    return 1 - probabilities <= limits


def lac_sets(probabilities: Tensor, scores: Scores | None, level: float) -> Tensor | None:
    """Return the LAC sets of images at a coverage, bool (N, classes); None if there are too few held-out images.

    probabilities: (N, classes), at the temperature. scores: result of `held_out_scores` for other images.
    """
    try:
        return prediction_sets(probabilities, set_limits(scores, Coverage(level)))
    except UsageError:
        return None


def measured_coverage(probabilities: Tensor, labels: Tensor, scores: Scores | None) -> list[dict[str, float]]:
    """Return how often the sets of test images contain the true class, for each of `LEVELS` that can be reached.

    Returns:
        `coverage` (requested), `measured`, and `set_size` (mean number of classes). Arguments are those of `lac_sets`.
    """
    results = []
    for level in LEVELS:
        sets = lac_sets(probabilities, scores, level)
        if sets is not None:
            covered = sets.gather(1, labels[:, None]).double().mean()
            size = sets.sum(1).double().mean()
            results.append({"coverage": level, "measured": round(float(covered), 6), "set_size": round(float(size), 6)})
    return results
