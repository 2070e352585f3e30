"""Results on images with several labels at the thresholds of the labels, with 95 % intervals.

The intervals are the middle 95 % of `DRAWS` bootstrap samples of the images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from cifar_lit.training.label_scores import label_scores

DRAWS = 200


def label_results(
    probabilities: Tensor, labels: Tensor, thresholds: Sequence[float], classes: Sequence[str]
) -> dict[str, object]:
    """Return `labels`, results of each label by name, and `at_thresholds`, scores with the ends of their intervals.

    probabilities, labels: (N, classes), of the test images.
    """
    count = len(labels)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
    weights = np.vstack([weights, np.ones_like(weights[:1])])  # the last sample has each image once
    scores = label_scores(probabilities, labels, thresholds, weights)
    own: dict[str, dict[str, object]] = {}
    for number, name in enumerate(classes):
        precision, *interval = with_interval(scores.average_precision[:, number])
        own[name] = {
            "images": int(scores.labelled[-1, number]),
            "average_precision": precision,
            "interval": interval,
            "threshold": thresholds[number],
        }
        for measure in ("precision", "recall", "f1"):
            own[name][measure] = round(float(getattr(scores, measure)[-1, number]), 6)
    return {"labels": own, "at_thresholds": {name: with_interval(drawn) for name, drawn in scores.totals.items()}}


def with_interval(drawn: np.ndarray) -> list[float]:
    """Return the value of the last sample, and the ends of the interval of the others."""
    others = drawn[:-1][~np.isnan(drawn[:-1])]
    ends = np.quantile(others, (0.025, 0.975)) if len(others) else (np.nan, np.nan)
    return [round(float(value), 6) for value in (drawn[-1], *ends)]
