"""The card of a trained net: its settings, and what is fitted on held-out images.

The temperature makes probabilities honest on average, rejection asks whether an image is of any of the classes, and a
prediction set (`inference.sets`) contains the true class with a stated probability.

The temperature follows C. Guo et al. (On Calibration of Modern Neural Networks, ICML 2017). A net trained with label
smoothing is underconfident.

An image that resembles none of the classes is rejected by its energy, -T · logsumexp(logits / T) with T = 1 (W. Liu et
al., Energy-based Out-of-distribution Detection, NeurIPS 2020). It needs only the logits. results/lab-notebook.md
compares it with other scores. A model stores the scores that 2 % and 20 % of new images are expected to exceed. For
other rates, the score is linear in the square root of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import spread_rows
from cifar_lit.inference.model_file import MAX_TEMPERATURE, ModelCard, build_loaded_net
from cifar_lit.inference.sets import MIN_HELD_OUT, held_out_scores
from cifar_lit.run.predictions import set_logits

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier
MAX_DESCRIBED = 10_000  # validation images used to fit the temperature and the scores
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
    logits = set_logits(net, images, val, "fitting the temperature")
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
