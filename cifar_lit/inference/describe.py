"""The metadata of a trained net: settings, and temperature and novelty threshold fitted on validation images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cifar_lit.data.image_set import spread_rows
from cifar_lit.inference.load import READ_AT_ONCE, Classifier
from cifar_lit.inference.novelty import novelty_threshold
from cifar_lit.runs.calibration import fit_temperature
from cifar_lit.runs.model_file import ModelCard, build_loaded_net

MAX_DESCRIBED = 10_000  # validation images used to fit the temperature and the novelty threshold


def model_card(model: Any, data: Any) -> ModelCard:
    """Return the metadata of model.safetensors for an ImageClassifier and its ImageData."""
    h, (mean, std) = model.hparams, data.statistics
    options = dict(h["net_options"] or {})
    shape, classes = h["input_shape"], list(data.classes)
    return ModelCard(h["net"], h["width"], shape, classes, mean, std, options, resize=data.settings.resize)


def describe_model(model: Any, data: Any) -> ModelCard:
    """Return the card of a trained net, with the temperature and the novelty threshold fitted on its validation images.

    Without validation images, temperature and threshold are None.
    """
    card, images = model_card(model, data), data.train_images
    val = spread_rows(data.split[1], MAX_DESCRIBED)
    # Fitted in float32, the precision in which the net will be used.
    classifier = Classifier(build_loaded_net(card, model.net.state_dict()), str(data.device))
    logits = torch.cat([classifier(images.take(rows).permute(0, 3, 1, 2)) for rows in val.split(READ_AT_ONCE)])
    temperature = fit_temperature(logits, images.labels[val])
    return replace(card, temperature=temperature, novelty_threshold=novelty_threshold(logits))
