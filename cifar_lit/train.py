"""Fit, evaluate and write the results of one run. `cli/fit.py` builds the arguments and prints the results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import write_text
from cifar_lit.data.datamodule import ImageData
from cifar_lit.inference.calibration import tempered
from cifar_lit.inference.model_file import save_weights
from cifar_lit.inference.sets import MIN_HELD_OUT
from cifar_lit.run.card import fitted_card
from cifar_lit.run.predictions import write_predictions
from cifar_lit.run.record import Metrics, write_metrics
from cifar_lit.run.results import Tested, run_metrics, test_scores, val_scores
from cifar_lit.run.resume import PREVIOUS
from cifar_lit.run.run import Run
from cifar_lit.runs.figures import MAX_DRAWN, as_pixels, confusion_matrix, curve_figure, curves, save_picture
from cifar_lit.runs.label_errors import list_training_labels
from cifar_lit.runs.report import page_of
from cifar_lit.training.checkpoint import load_weights, read_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.score import Score


@dataclass(frozen=True)
class Results:
    """Results of one run. `val` and `test` are None if those images were not evaluated."""

    metrics: Metrics
    val: Score | None
    test: Tested | None


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
    run.folder.test_weights(run.checkpoint, final)
    val = test = None
    if run.best.best_model_path:
        val = Score.from_dict(final["cifar_lit"]["score"])
    if run.command == "train":  # `fit` does not test
        test = _tested("test", trainer, model, data)
    return write_results(run, trainer, model, data, val=val, test=test)


def evaluate(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> Results | None:
    """Evaluate the model on the validation or test images, and write the results. Returns None when `fit` does."""
    is_validation = run.command == "validate"
    if is_validation and not len(data.split[1]):
        raise UsageError("there is nothing to validate on: data.val_size is 0. Use test, or set data.val_size")
    tested = _tested(run.command, trainer, model, data)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    if tested and is_validation:
        return write_results(run, trainer, model, data, val=tested.score, test=None)
    return write_results(run, trainer, model, data, val=None, test=tested)


def predict(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> int:
    """Write the predictions for the test images. Return the number of images, 0 in a `fast_dev_run`."""
    batches: Any = trainer.predict(model, datamodule=data, return_predictions=True)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return 0
    thresholds = fitted_card(model, data, is_stored=False).thresholds
    return write_predictions(run.folder.path / "predictions.csv", batches, data.test_images, thresholds)


def write_results(
    run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData, *, val: Score | None, test: Tested | None
) -> Results | None:
    """Write weights, predictions, figures, report and metrics.json. A run with metrics.json counts as finished."""
    folder = run.folder.path
    if not trainer.is_global_zero:
        return None
    _draw(run, test.score if test else val, data.classes)
    card = fitted_card(model, data, test.predictions if test else None, run.trains)
    if run.trains:
        list_training_labels(folder, data.train_images, data.parts.part_names())
        save_weights(folder / "model.safetensors", model.net.state_dict(), card)
        with suppress(OSError):  # a leftover checkpoint is harmless
            (folder / PREVIOUS).unlink()
    metrics = run_metrics(run, trainer, model, data)
    if val:
        metrics["val"] = val_scores(val)
    if test:
        held_out = None
        if len(data.split[1]) >= MIN_HELD_OUT:  # else the card's scores are those of these test images
            held_out = card.coverage
        metrics["test"] = test_scores(test, data.test_images, card, held_out)
    if test and test.predictions is not None:
        write_predictions(folder / "predictions.csv", [test.predictions], data.test_images, card.thresholds)
        if run.trains:
            probabilities = tempered(test.predictions["probabilities"], card.temperature)
            predictions = {**test.predictions, "probabilities": probabilities}
            write_text(folder / "report.html", page_of(folder, metrics, data, predictions, duplicates=None))
    write_metrics(folder, metrics)
    return Results(metrics, val, test)


def _tested(stage: str, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> Tested | None:
    """Run `validate` or `test` and return the results; None if the Trainer is limited to no batch."""
    model.score = model.predictions = None
    getattr(trainer, stage)(model, datamodule=data, verbose=False)
    if model.score is None:
        return None
    tta = None
    if views := model.views_score:
        tta = {"views": model.hparams["tta"], "accuracy": views.accuracy, "loss": views.loss}
    return Tested(model.score, tta, model.predictions)


def _draw(run: Run, score: Score | None, classes: Sequence[str]) -> None:
    """Log the confusion matrix, and write it and the curves of a training to the run folder as PNG."""
    folder = run.folder
    if score and score.confusion and len(classes) <= MAX_DRAWN:
        figure = confusion_matrix(torch.tensor(score.confusion), classes)
        for board in run.boards:
            board.log_images("confusion_matrix", as_pixels(figure), folder.tested["step"])
        if run.trains:
            save_picture(folder.path / "confusion_matrix.png", figure)
    if run.trains and (charts := curves(folder.path)):
        save_picture(folder.path / "curves.png", curve_figure(charts))
    for board in run.boards:
        board.close()
