"""The card of a trained net: its settings, and what is fitted on held-out images.

The temperature makes probabilities honest on average, rejection asks whether an image is of any of the classes, and
coverage gives a set of classes that contains the true one with a stated probability.

The temperature follows C. Guo et al. (On Calibration of Modern Neural Networks, ICML 2017). A net trained with label
smoothing is underconfident.

An image that resembles none of the classes is rejected by its energy, -T · logsumexp(logits / T) with T = 1 (W. Liu et
al., Energy-based Out-of-distribution Detection, NeurIPS 2020). It needs only the logits. docs/lab-notebook.md compares
it with other scores. A model stores the scores that 2 % and 20 % of new images are expected to exceed. For other rates,
the score is linear in the square root of the rate.

Prediction sets follow split conformal prediction (V. Vovk, A. Gammerman and G. Shafer, 2005). They have the stated
coverage for new images like the held-out ones, whatever the net: LAC (M. Sadinle, J. Lei and L. Wasserman, Least
Ambiguous Set-Valued Classifiers, JASA 2019) has the smallest sets, which may be empty for an image without a probable
class. APS (Y. Romano, M. Sesia and E. Candès, Classification with Valid and Adaptive Coverage, NeurIPS 2020) has larger
sets for uncertain images, and at least one class in each; it is used here without its random part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cifar_lit.data.image_set import spread_rows
from cifar_lit.errors import UsageError, check_choice
from cifar_lit.runs.model_file import MAX_TEMPERATURE, READ_AT_ONCE, SETS, ModelCard, build_loaded_net

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier
MAX_DESCRIBED = 10_000  # validation images used to fit the temperature and the scores
MIN_HELD_OUT = 20  # images; 5 % of fewer is less than one
BISECTIONS = 20  # relative error of the temperature: 6e-6
STORED_RATES = (0.02, 0.2)
MAX_RATE = 0.5
FALSE_ALARMS = 0.05  # default rate


def model_card(model: ImageClassifier, data: ImageData) -> ModelCard:
    """Return the metadata of model.safetensors for a net and its data."""
    h = model.hparams
    mean, std = data.statistics
    card = ModelCard(
        net=h["net"],
        width=h["width"],
        input_shape=h["input_shape"],
        classes=list(data.classes),
        mean=mean,
        std=std,
        options=dict(h["net_options"] or {}),
        resize=data.settings.resize,
    )
    if data.train_images.levels is not None:
        card = replace(card, levels=list(data.train_images.levels))
    if len(data.split[1]) < MIN_HELD_OUT:  # else the run fits its own
        card = replace(card, temperature=h["temperature"])
    return card


def describe_model(model: ImageClassifier, data: ImageData) -> ModelCard:
    """Return the card of a trained net, with temperature, rejection and coverage fitted on its validation images.

    With fewer than `MIN_HELD_OUT`, the temperature is `model.temperature`. The other two then come from the test
    images, if they were tested. This changes no accuracy, but the report cannot measure them on the same images.
    """
    card, images = model_card(model, data), data.train_images
    if len(data.split[1]) < MIN_HELD_OUT:
        if tested := model.predictions:
            scores = held_out_scores(tempered(tested["probabilities"], card.temperature), tested["labels"])
            card = replace(card, reject=reject_scores(tested["novelty"]), coverage=scores)
        return card
    val = spread_rows(data.split[1], MAX_DESCRIBED)
    # Fitted in float32, the precision in which the net will be used.
    net = build_loaded_net(card, model.net.state_dict()).on(data.device)
    logits = torch.cat([net.logits(images.take(rows).permute(0, 3, 1, 2)) for rows in val.split(READ_AT_ONCE)])
    card = replace(card, temperature=fit_temperature(logits, images.labels[val]), reject=reject_scores(novelty(logits)))
    probabilities = (logits.double() / (card.temperature or 1)).softmax(1)
    return replace(card, coverage=held_out_scores(probabilities, images.labels[val]))


# ---- temperature


def tempered(probabilities: Tensor, temperature: float | None) -> Tensor:
    """Return the probabilities (N, classes) of temperature 1 at another temperature; None leaves them as they are."""
    if temperature is None:
        return probabilities
    return (probabilities.log() / temperature).softmax(1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float | None:
    """Return the temperature with the smallest mean negative log-likelihood on held-out images.

    The mean is convex in 1 / T, so bisection on the sign of its slope finds the minimum. Labels are smoothed by
    1 / (N + 2), as by J. Platt for two classes (1999). Otherwise a net without mistakes on few images would become
    arbitrarily confident.

    Args:
        logits: (N, classes) of images that the net was not trained on.
        labels: int64 (N,).

    Returns:
        The temperature in 1/20 … 20; None for fewer than 20 images or non-finite logits.
    """
    count, logits = len(labels), logits.double()
    if count < MIN_HELD_OUT or not logits.isfinite().all():
        return None
    targets = torch.lerp(logits.gather(1, labels[:, None])[:, 0], logits.mean(1), 1 / (count + 2))
    low, high = -math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        slope = ((logits / math.exp(middle)).softmax(1) * logits).sum(1).mean() - targets.mean()
        if slope > 0:
            low = middle
        else:
            high = middle
    return round(math.exp((low + high) / 2), 6)


# ---- rejection


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


def check_rate(rate: float, scores: Sequence[float] | None = ()) -> float:
    """Return a valid rate. Raise UsageError for an invalid one, and for a model without scores."""
    if not 0 < rate <= MAX_RATE:
        raise UsageError(f"reject is a false-alarm rate above 0 and up to {MAX_RATE:g}, not {rate:g}: use 0.05")
    if scores is None:
        raise UsageError(f"this model cannot reject images: train it with at least {MIN_HELD_OUT} validation images")
    return rate


def threshold(scores: Sequence[float], rate: float, rates: Sequence[float] = STORED_RATES) -> float:
    """Return the score above which an image is unknown at a valid rate, for two scores and their `rates`."""
    low, high = map(math.sqrt, rates)
    return scores[0] + (scores[1] - scores[0]) * (math.sqrt(rate) - low) / (high - low)


# ---- prediction sets


class Coverage(NamedTuple):
    """Prediction sets to return.

    rate: probability that a set contains the true class, above 0 and below 1.
    kind: lac or aps.
    by_class: reach the rate for the images of each class, instead of for all images together.
    """

    rate: float
    kind: str = "lac"
    by_class: bool = False


def set_scores(probabilities: Tensor, kind: str) -> Tensor:
    """Return how strange each class would be as the true one, (N, classes); a set holds those up to a limit.

    For LAC, it is the probability of all other classes; for APS, that of the more probable ones.
    """
    if kind == "lac":
        return 1 - probabilities
    ordered, order = probabilities.sort(dim=1, descending=True)
    return torch.zeros_like(probabilities).scatter(1, order, ordered.cumsum(1) - ordered)


def held_out_scores(probabilities: Tensor, labels: Tensor) -> dict[str, list[list[float]]] | None:
    """Return the ascending scores of the true classes of held-out images: a list for each class, by kind of set.

    probabilities: (N, classes), at the temperature. labels: int64 (N,). None for fewer than `MIN_HELD_OUT` images, or
    values that are not finite.
    """
    if len(labels) < MIN_HELD_OUT or not probabilities.isfinite().all():
        return None
    scores: dict[str, list[list[float]]] = {}
    for kind in SETS:
        own = set_scores(probabilities, kind).gather(1, labels[:, None])[:, 0]
        scores[kind] = []
        for label in range(probabilities.shape[1]):
            values = own[labels == label].sort().values.tolist()
            # Rounded up: sets with a limit of 0 would be empty for a confident net.
            scores[kind].append([math.ceil(value * 1e6) / 1e6 for value in values])
    return scores


def set_limits(scores: Mapping[str, Sequence[Sequence[float]]] | None, coverage: Coverage) -> Tensor:
    """Return the highest score of a class in a prediction set, float32 (classes,).

    It is the k-th smallest of N held-out scores with k = ⌈rate · (N + 1)⌉: a new score is at most that with a
    probability of at least `rate`. All classes have the same limit unless `by_class`.

    Args:
        scores: result of `held_out_scores`.

    Raises:
        UsageError: the coverage is invalid, or needs more held-out images.
    """
    rate = coverage.rate
    check_choice("the kind of prediction sets", coverage.kind, SETS)
    if not 0 < rate < 1:
        raise UsageError(f"coverage is a probability above 0 and below 1, not {rate:g}: use 0.95")
    if scores is None:
        raise UsageError(f"this model has no prediction sets: train it with {MIN_HELD_OUT} or more validation images")
    by_class = scores[coverage.kind]
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


def prediction_sets(probabilities: Tensor, limits: Tensor, kind: str) -> Tensor:
    """Return whether each class is in the set, bool (N, classes). limits: result of `set_limits`."""
    return set_scores(probabilities, kind) <= limits


LEVELS = (0.8, 0.9, 0.95, 0.99)
HeldOut = Mapping[str, Sequence[Sequence[float]]] | None


def measured_sets(probabilities: Tensor, labels: Tensor, held_out: HeldOut, level: float) -> Tensor | None:
    """Return the LAC sets of test images at a coverage, bool (N, classes); None if there are too few held-out images.

    Args:
        probabilities: (N, classes), at the temperature. labels: int64 (N,).
        held_out: scores of images other than these. With None, the limits for each half of these images come from the
            other half.
    """
    return _sets_at(probabilities, _scores_for(probabilities, labels, held_out), level)


def _scores_for(probabilities: Tensor, labels: Tensor, held_out: HeldOut) -> list[tuple[slice, HeldOut]]:
    """Return parts of the test images, each with the scores for its limits. Arguments are those of `measured_sets`."""
    if held_out is not None:
        return [(slice(None), held_out)]
    even, odd = slice(0, None, 2), slice(1, None, 2)
    parts: list[tuple[slice, HeldOut]] = []
    for rows, others in ((even, odd), (odd, even)):
        parts.append((rows, held_out_scores(probabilities[others], labels[others])))
    return parts


def _sets_at(probabilities: Tensor, parts: Sequence[tuple[slice, HeldOut]], level: float) -> Tensor | None:
    sets = torch.zeros(probabilities.shape, dtype=torch.bool)
    try:
        for rows, scores in parts:
            sets[rows] = prediction_sets(probabilities[rows], set_limits(scores, Coverage(level)), "lac")
    except UsageError:
        return None
    return sets


def measured_coverage(
    probabilities: Tensor, labels: Tensor, held_out: HeldOut, classes: Sequence[str]
) -> list[dict[str, object]]:
    """Return how often the sets of test images contain the true class, for each of `LEVELS` that can be reached.

    Arguments are those of `measured_sets`.

    Returns:
        `coverage` (requested), `measured`, `set_size` (mean number of classes), and `per_class`, which has the last two
        of each class with images.
    """
    parts = _scores_for(probabilities, labels, held_out)
    results: list[dict[str, object]] = []
    for level in LEVELS:
        sets = _sets_at(probabilities, parts, level)
        if sets is None:
            break
        hits, sizes = sets.gather(1, labels[:, None])[:, 0].double(), sets.sum(1).double()
        per_class = {}
        for label, name in enumerate(classes):
            rows = labels == label
            if rows.any():
                per_class[name] = [round(float(hits[rows].mean()), 6), round(float(sizes[rows].mean()), 6)]
        whole = {"measured": round(float(hits.mean()), 6), "set_size": round(float(sizes.mean()), 6)}
        results.append({"coverage": level, **whole, "per_class": per_class})
    return results
