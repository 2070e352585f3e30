"""Optional features of a training: from the settings of `ImageClassifier` to callbacks.

To add a feature, write a callback in its own file and add it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping

from cifar_lit.errors import UsageError, check_choice
from cifar_lit.models.whitened import WhitenedNet
from cifar_lit.training.captured import CapturedSteps
from cifar_lit.training.class_weights import CLASS_WEIGHTS, ClassWeights
from cifar_lit.training.early_stopping import EarlyStop
from cifar_lit.training.finetune import FixedNorms, HeadFit, PretrainedWeights
from cifar_lit.training.margins import Margins
from cifar_lit.training.rows import LateRows
from cifar_lit.training.weight_average import WeightAverage
from cifar_lit.training.whitening import Whitening


def check_features(h: Mapping[str, Any]) -> None:
    """Raise UsageError for invalid settings of these features."""
    check_choice("model.class_weights", h["class_weights"], CLASS_WEIGHTS)
    if h["head_views"] < 0 or not (h["unfreeze"] or (h["weights"] and h["head_views"])):
        raise UsageError(
            "model.unfreeze false fits only the last layer: set model.weights, and model.head_views above 0"
        )
    if h["margins"] and not h["unfreeze"]:
        raise UsageError("model.margins needs training steps: set model.unfreeze true, or model.margins false")
    if h["frozen"] and not h["weights"]:
        raise UsageError("model.frozen needs pretrained layers: set model.weights, or leave it at 0")


def feature_callbacks(model: Any, trainer: pl.Trainer) -> list[Callback]:
    """Return the callbacks for the settings of an ImageClassifier, in the order in which they must run."""
    h = model.hparams
    callbacks: list[Callback] = []
    if h["weights"]:
        callbacks.append(PretrainedWeights(h["weights"]))
    if h["ema_decay"]:
        callbacks.append(WeightAverage(h["ema_decay"]))
    if h["class_weights"] != "none":
        callbacks.append(ClassWeights(h["class_weights"]))
    if h["margins"]:
        callbacks.append(Margins())
    if h["fixed_norms"]:
        callbacks.append(FixedNorms())
    if isinstance(model.net, WhitenedNet):
        callbacks.append(Whitening())
    if h["weights"] and h["head_views"]:
        callbacks.append(HeadFit(h["head_views"], h["unfreeze"]))
    # A user's EarlyStopping takes precedence. An EarlyStop may be left from an earlier fit of this Trainer.
    stops = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]  # type: ignore[attr-defined]
    if h["patience"] and all(isinstance(callback, EarlyStop) for callback in stops):
        monitor, mode = model.monitored
        callbacks.append(EarlyStop(monitor, mode, h["patience"], trainer.max_epochs))
    if h["capture"]:
        callbacks.append(CapturedSteps())
    has_rows = any(isinstance(callback, LateRows) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.strategy.root_device.type != "cpu" and not has_rows:
        callbacks.append(LateRows())
    return callbacks
