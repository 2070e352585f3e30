"""Nets whose first weights are computed from the training images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cifar_lit.errors import UsageError
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training.callbacks import WeightAverage

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

IMAGES = 5_000  # as the records do (fast-recipes, airbench)


def initialise_from_images(model: ImageClassifier) -> None:
    """Whitens a net that wants it and is not whitened yet: on the first device, and from there on all.

    Raises UsageError when the fit has no datamodule to take images from.
    """
    net, trainer = model.net, model.trainer
    if not isinstance(net, WhitenedNet) or bool(net.whitened):
        return
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if data is None:
        raise UsageError(f"{model.hparams['net']} is initialised from training images: fit it with a datamodule")
    if trainer.is_global_zero:
        net.initialise(data.plain_images(IMAGES).to(net.whiten.weight))
    net.whiten.weight.data.copy_(trainer.strategy.broadcast(net.whiten.weight.detach()))
    net.whitened.fill_(True)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAverage):
            callback.begin_at(model)
