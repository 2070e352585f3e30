"""The metadata of a trained net: settings, and temperature and scores for `--reject` fitted on held-out images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cifar_lit.data.image_set import spread_rows
from cifar_lit.inference.load import READ_AT_ONCE, Classifier
from cifar_lit.inference.unknown import novelty, reject_scores
from cifar_lit.runs.calibration import MIN_HELD_OUT, fit_temperature
from cifar_lit.runs.model_file import ModelCard, build_loaded_net

MAX_DESCRIBED = 10_000  # validation images used to fit the temperature and the scores


def model_card(model: Any, data: Any) -> ModelCard:
    """Return the metadata of model.safetensors for an ImageClassifier and its ImageData."""
    h, (mean, std) = model.hparams, data.statistics
    options = dict(h["net_options"] or {})
    shape, classes = h["input_shape"], list(data.classes)
    # Set in the recipe. A run with enough validation images fits its own.
    temperature = None if len(data.split[1]) >= MIN_HELD_OUT else h["temperature"]
    levels = data.train_images.levels
    return ModelCard(
        h["net"], h["width"], shape, classes, mean, std, options, temperature=temperature,
        resize=data.settings.resize, levels=None if levels is None else list(levels),
    )  # fmt: skip


def describe_model(model: Any, data: Any) -> ModelCard:
    """Return the card of a trained net, with temperature and scores for `--reject` fitted on its validation images.

    With fewer than `MIN_HELD_OUT`, the temperature is `model.temperature`. The scores then come from the test images,
    if they were tested; their labels are not used.
    """
    card, images = model_card(model, data), data.train_images
    if len(data.split[1]) < MIN_HELD_OUT:
        return replace(card, reject=reject_scores(model.predictions["novelty"]) if model.predictions else None)
    val = spread_rows(data.split[1], MAX_DESCRIBED)
    # Fitted in float32, the precision in which the net will be used.
    classifier = Classifier(build_loaded_net(card, model.net.state_dict()), str(data.device))
    logits = torch.cat([classifier(images.take(rows).permute(0, 3, 1, 2)) for rows in val.split(READ_AT_ONCE)])
    temperature = fit_temperature(logits, images.labels[val])
    return replace(card, temperature=temperature, reject=reject_scores(novelty(logits)))
