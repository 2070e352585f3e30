"""Fit, evaluate and write the results of one run. `cli/fit.py` builds the arguments and prints the results."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import write_text
from cifar_lit.data.datamodule import ImageData
from cifar_lit.inference.model_file import save_weights
from cifar_lit.run.card import describe_model, model_card
from cifar_lit.run.predictions import prediction_table, write_predictions
from cifar_lit.run.record import write_metrics
from cifar_lit.run.results import run_metrics
from cifar_lit.run.resume import PREVIOUS
from cifar_lit.run.run import Run
from cifar_lit.runs.figures import as_pixels, confusion_matrix
from cifar_lit.runs.report import render
from cifar_lit.training.checkpoint import load_weights, read_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.score import Score


@dataclass(frozen=True)
class Results:
    """Results of one run. A score is None if those images were not evaluated."""

    metrics: dict[str, Any]  # contents of metrics.json
    val: Score | None
    test: Score | None


def fit(
    run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, checkpoint: str | Path | None
) -> Results | None:
    """Train, load the best weights, test them if the command is `train`, and write the results.

    Returns None in a `fast_dev_run` and on every rank but 0.
    """
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    final = read_checkpoint(Path(run.checkpoint))  # the best one, or the last one without validation
    load_weights(model, run.checkpoint, final)
    val = test = None
    if run.best.best_model_path:
        val = Score.from_dict(final["cifar_lit"]["score"])
    if run.command == "train":  # `fit` does not test
        test = _score("test", trainer, model, data)
    return write_results(run, model, data, val, test)


def evaluate(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> Results | None:
    """Evaluate the model on the validation or test images, and write the results. Returns None when `fit` does."""
    is_validation = run.command == "validate"
    if is_validation and not len(data.split[1]):
        raise UsageError("there is nothing to validate on: data.val_size is 0. Use test, or set data.val_size")
    score = _score(run.command, trainer, model, data)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    return write_results(run, model, data, score if is_validation else None, None if is_validation else score)


def predict(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> int:
    """Write the predictions for the test images. Return the number of images, 0 in a `fast_dev_run`."""
    batches: Any = trainer.predict(model, datamodule=data, return_predictions=True)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return 0
    return write_predictions(run.folder.path / "predictions.csv", batches, data.test_images)


def write_results(
    run: Run, model: ImageClassifier, data: ImageData, val: Score | None, test: Score | None
) -> Results | None:
    """Write weights, predictions, figures, report and metrics.json. A run with metrics.json counts as finished."""
    trainer, folder = model.trainer, run.folder.path
    if not trainer.is_global_zero:
        return None
    card = describe_model(model, data) if run.trains else model_card(model, data)
    metrics = run_metrics(run, model, data, val, test, card)
    if run.boards:
        _log_pictures(run, val, test, data, trainer.global_step)
    if run.trains:
        save_weights(folder / "model.safetensors", model.net.state_dict(), card)
        with suppress(OSError):  # a leftover checkpoint is harmless
            (folder / PREVIOUS).unlink()
    if test and model.predictions is not None:
        write_predictions(folder / "predictions.csv", [model.predictions], data.test_images)
        if run.trains:
            page = render(folder, metrics, data, prediction_table(model.predictions))
            write_text(folder / "report.html", page)
    write_metrics(folder, metrics)
    return Results(metrics, val, test)


def _score(stage: str, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> Score | None:
    """Run `validate` or `test` and return the score."""
    model.score = model.predictions = None
    getattr(trainer, stage)(model, datamodule=data, verbose=False)
    return model.score


def _log_pictures(run: Run, val: Score | None, test: Score | None, data: ImageData, step: int) -> None:
    """Log the confusion matrices of the scores."""
    for board in run.boards:
        for part, score in (("val", val), ("test", test)):
            if score:
                picture = as_pixels(confusion_matrix(torch.tensor(score.confusion), data.classes))
                board.log_images(f"{part}/confusion_matrix", picture, step)
        board.save()
