"""The card of a run's net: its settings, and what is fitted on its validation images."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from cifar_lit.data.image_set import spread_rows
from cifar_lit.inference.calibration import PRESET, choose_temperature, tempered
from cifar_lit.inference.logits import set_logits
from cifar_lit.inference.model_file import LoadedNet, ModelCard
from cifar_lit.inference.rejection import novelty, reject_scores
from cifar_lit.inference.sets import MIN_HELD_OUT, held_out_scores
from cifar_lit.training.task import SeveralLabels

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier
MAX_DESCRIBED = 10_000  # validation images used to fit the temperature and the scores


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
        resize=data.settings.images.resize,
    )
    if data.train_images.levels is not None:
        card = replace(card, levels=list(data.train_images.levels))
    if isinstance(model.task, SeveralLabels):
        card = replace(card, thresholds=[0.5] * len(data.classes))
    elif h["temperature"] is not None:
        card = replace(card, temperature=h["temperature"], temperature_source=PRESET)
    return card


def fitted_card(
    model: ImageClassifier, data: ImageData, tested: Mapping[str, Tensor] | None = None, is_stored: bool = True
) -> ModelCard:
    """Return the card with temperature, rejection and coverage, or thresholds, fitted on validation images.

    With fewer than `MIN_HELD_OUT`, the temperature stays that of the model. The other two then come from the test
    images. This changes no accuracy, but the report cannot measure them on the same images.

    Args:
        tested: `ImageClassifier.predictions` for the test images, if they were tested.
        is_stored: with false, only thresholds are fitted, which the predictions need.
    """
    card = model_card(model, data)
    if not is_stored and card.thresholds is None:
        return card
    if len(data.split[1]) >= MIN_HELD_OUT:
        rows = spread_rows(data.split[1], MAX_DESCRIBED)
        labels = data.train_images.labels[rows]
        # Fitted in float32, the precision in which the net will be used.
        loaded = LoadedNet(deepcopy(model.net).float(), card).on(data.device)
        logits = set_logits(loaded, data.train_images, rows, "predicting the validation images")
        if isinstance(model.task, SeveralLabels):
            return replace(card, thresholds=model.task.thresholds(loaded.probabilities(logits), labels))
        temperature, source = choose_temperature(logits, labels, card.temperature)
        card = replace(card, temperature=temperature, temperature_source=source)
        scores, probabilities = novelty(logits), (logits.double() / (card.temperature or 1)).softmax(1)
    elif tested and card.thresholds is None:
        labels, scores = tested["labels"], tested["novelty"]
        probabilities = tempered(tested["probabilities"], card.temperature)
    else:
        return card
    return replace(card, reject=reject_scores(scores), coverage=held_out_scores(probabilities, labels))
