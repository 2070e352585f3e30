"""One training from data, model and Trainer to its results: fit, evaluate, write results.

`cli/fit.py` builds data, model, Trainer and run from the settings, and prints what these functions return.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.inference.describe import describe_model, model_card
from cifar_lit.models.checks import build_on_meta_device
from cifar_lit.runs.model_file import check_card, save_weights
from cifar_lit.runs.predictions import write_predictions
from cifar_lit.runs.results import draw_for_tensorboard, run_metrics, write_metrics, write_report
from cifar_lit.runs.run import Run
from cifar_lit.runs.run_folder import PREVIOUS
from cifar_lit.training.checkpoint import load_weights
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Score


@dataclass(frozen=True)
class Results:
    """What a command has found out.

    Args:
        metrics: the contents of metrics.json.
        val, test: the scores on validation and test images, None for a stage that was not run.
    """

    metrics: dict[str, Any]
    val: Score | None
    test: Score | None


def fit(
    run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, checkpoint: str | Path | None
) -> Results | None:
    """Train, load the best weights, test them if the command is `train`, and write the results.

    Returns None in a `fast_dev_run` and on all processes but the first.
    """
    check_before_fit(trainer, model, data)
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    best = load_weights(model, run.checkpoint)
    val = (
        Score.from_dict(best.get("cifar_lit", {}).get("score"), data.class_count) if run.best.best_model_path else None
    )
    test = _score("test", trainer, model, data) if run.command == "train" else None
    if val and not test:
        trainer.loggers = []  # This pass only collects predictions; the score is already logged.
        _score("validate", trainer, model, data)
    return write_results(run, model, data, val, test)


def evaluate(
    run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, checkpoint: str | Path
) -> Results | None:
    """Score a checkpoint on the validation or test images, and write the results. Returns None where `fit` does."""
    if run.command == "validate" and not len(data.split[1]):
        raise UsageError("there is nothing to validate on: data.val_size is 0")
    load_weights(model, checkpoint)
    score = _score(run.command, trainer, model, data)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    return write_results(run, model, data, *((score, None) if run.command == "validate" else (None, score)))


def predict(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, checkpoint: str | Path) -> int:
    """Write the predictions of a checkpoint for the test images; return their number, 0 in a `fast_dev_run`."""
    load_weights(model, checkpoint)
    batches: Any = trainer.predict(model, datamodule=data, return_predictions=True)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return 0
    return write_predictions(run.folder.path / "predictions.csv", data.classes, batches, data.test_images.names)


def write_results(
    run: Run, model: ImageClassifier, data: ImageData, val: Score | None, test: Score | None
) -> Results | None:
    """Write weights, predictions, pictures, report and metrics.json, the last of which marks the run as finished."""
    trainer, folder = model.trainer, run.folder.path
    if not trainer.is_global_zero:
        return None
    card = describe_model(model, data) if run.trains else model_card(model, data)
    metrics = run_metrics(run, model, data, val, test, card.temperature)
    if run.board:
        draw_for_tensorboard(run.board, val, test, model.predictions, data, trainer.global_step)
    if run.trains:
        save_weights(folder / "model.safetensors", model.net.state_dict(), card)
        with suppress(OSError):  # The run is finished: a file that cannot be removed does no harm.
            (folder / PREVIOUS).unlink()
    if test and model.predictions is not None:
        write_predictions(folder / "predictions.csv", data.classes, [model.predictions], data.test_images.names)
        if run.trains:
            write_report(folder, metrics, model.predictions, data)
    write_metrics(folder, metrics)
    return Results(metrics, val, test)


def check_before_fit(trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> None:
    """Raise UsageError for data, model and devices that do not fit together, before there is a run folder."""
    check_card(model_card(model, data))
    data.trainer = trainer  # the loaders share batches out among its devices
    data.train_dataloader()
    h, (channels, height, width) = model.hparams, data.input_shape
    for side in data.resolutions:  # the net refuses images that are too small for it
        shape = {
            "channels": channels,
            "image_size": (side, round(side * width / height)),
            "num_classes": data.class_count,
        }
        build_on_meta_device(h["net"], **shape, width=h["width"], options=h["net_options"])


def _score(stage: str, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> Score | None:
    """Run `validate` or `test`; return the score."""
    model.score = model.predictions = None
    getattr(trainer, stage)(model, datamodule=data, verbose=False)
    return model.score
