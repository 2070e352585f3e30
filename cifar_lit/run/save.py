"""Save a net that was trained under a plain Trainer, for `load` and the commands that use a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import write_text
from cifar_lit.base.settings import without_passwords
from cifar_lit.inference.model_file import MODEL, save_weights
from cifar_lit.run.card import fitted_card
from cifar_lit.run.predictions import write_predictions
from cifar_lit.run.record import write_metrics
from cifar_lit.run.results import Tested, test_scores

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier


def save(model: ImageClassifier, data: ImageData, folder: str | Path) -> None:
    """Write a trained net to a new folder, which classify, serve, export, report and compare accept as a run.

    The folder gets model.safetensors, config.yaml with the settings of the data and, if the model was tested last,
    metrics.json and predictions.csv.

    Raises:
        UsageError: the folder has a model.safetensors already.
    """
    path = Path(folder).expanduser()
    if (path / MODEL).exists():
        raise UsageError(f"{folder} has a {MODEL} already: choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    tested = model.predictions
    if tested and not torch.equal(tested["labels"], data.test_images.labels):  # those of a validation
        tested = None
    card = fitted_card(model, data, tested)
    save_weights(path / MODEL, model.net.state_dict(), card)
    settings = {"dataset": data.dataset, "root": data.settings.root, "val_size": data.given["data.val_size"]}
    for name in ("split", "images", "loading"):
        settings[name] = asdict(getattr(data.settings, name))
    write_text(path / "config.yaml", without_passwords(yaml.safe_dump({"data": settings})))
    if model.score and tested:
        write_predictions(path / "predictions.csv", [tested], data.test_images, card.thresholds)
        scores = test_scores(Tested(model.score, predictions=tested), data.test_images, card, card.coverage)
        write_metrics(path, {"net": card.net, "dataset": data.dataset, "test": scores})
