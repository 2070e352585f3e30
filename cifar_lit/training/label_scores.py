"""Scores of images with several labels, also of weighted samples of them. Unknown labels are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

# Scores over all labels. The accuracy is the share of images with all labels right.
LABEL_SCORES = ("mean_average_precision", "macro_f1", "micro_f1", "hamming_loss", "accuracy")


DIGITS = 12  # the last digits of probabilities of equal logits depend on their place in memory


class LabelScores(NamedTuple):
    """Scores of each sample, float (samples, classes)."""

    labelled: np.ndarray  # number of images with the label
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    average_precision: np.ndarray  # NaN without an image that has the label
    totals: dict[str, np.ndarray]  # `LABEL_SCORES` of each sample, (samples,)


def label_scores(
    probabilities: Tensor, labels: Tensor, thresholds: float | Sequence[float], weights: np.ndarray
) -> LabelScores:
    """Return the scores of samples.

    Args:
        probabilities: float (N, classes).
        labels: float (N, classes), as in `ImageSet`.
        thresholds: probability from which an image gets a label, for all labels or for each.
        weights: number of times that a sample has each image, int (samples, N).
    """
    has, known = (labels == 1).cpu().numpy(), (labels >= 0).cpu().numpy()
    mantissa, exponent = np.frexp(probabilities.double().cpu().numpy())
    values = np.ldexp(mantissa.round(DIGITS), exponent)
    given = (values >= np.array(thresholds)) & known
    labelled, predicted, hits = weights @ has, weights @ given, weights @ (has & given)
    precision, recall = hits / np.maximum(predicted, 1), hits / np.maximum(labelled, 1)
    f1 = 2 * hits / np.maximum(labelled + predicted, 1)
    columns = zip(values.T, has.T, known.T, strict=True)
    areas = np.stack([average_precision(column, own, weights * counts) for column, own, counts in columns], 1)
    totals = (
        _mean_of_labels(areas, labelled),
        _mean_of_labels(f1, labelled),
        2 * hits.sum(1) / np.maximum((labelled + predicted).sum(1), 1),
        (weights @ (given != has)).sum(1) / np.maximum((weights @ known).sum(1), 1),
        weights @ (given == has).all(1) / len(has),
    )
    return LabelScores(labelled, precision, recall, f1, areas, dict(zip(LABEL_SCORES, totals, strict=True)))


def _mean_of_labels(values: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """Return the mean of values (samples, classes) over the labels that images of a sample have; NaN without any."""
    exists = labelled > 0
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = np.where(exists, values, 0).sum(1) / exists.sum(1)
    return mean


def average_precision(values: np.ndarray, has: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the average precision for each row of weights; NaN without an image that has the label.

    values: probabilities (N,). has: bool (N,). weights: number of times that each image counts, (samples, N).
    """
    order = np.argsort(-values, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # equal probabilities count together
    hits = np.cumsum(weights[:, order] * has[order], 1)[:, ends]
    images = np.cumsum(weights[:, order], 1)[:, ends]
    gained = np.diff(hits, prepend=0)
    with np.errstate(invalid="ignore"):
        precision: np.ndarray = (gained * hits / np.maximum(images, 1)).sum(1) / hits[:, -1]
    return precision
