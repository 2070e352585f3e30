"""The card of a run's net: its settings, and what is fitted on its validation images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cifar_lit.data.image_set import spread_rows
from cifar_lit.inference.calibration import fit_temperature, tempered
from cifar_lit.inference.logits import set_logits
from cifar_lit.inference.model_file import ModelCard, build_loaded_net
from cifar_lit.inference.rejection import novelty, reject_scores
from cifar_lit.inference.sets import MIN_HELD_OUT, held_out_scores

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
