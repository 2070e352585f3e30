"""Results of a run: metrics.json, pictures, and report.html."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.files import write_text
from cifar_lit.hardware import processor
from cifar_lit.runs.card import MIN_HELD_OUT, measured_coverage, measured_sets, tempered
from cifar_lit.runs.data_record import data_record
from cifar_lit.runs.figures import GALLERY_SIZE, confusion_matrix, expected_calibration_error, gallery, reliability
from cifar_lit.runs.groups import COVERED, group_results
from cifar_lit.runs.model_file import ModelCard
from cifar_lit.runs.predictions import fingerprint, prediction_table
from cifar_lit.runs.report import captions, render
from cifar_lit.runs.run import Run
from cifar_lit.stats import wilson_interval
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Score

Predictions = Mapping[str, Tensor]  # `ImageClassifier.predictions`


def run_metrics(
    run: Run, model: ImageClassifier, data: ImageData, val: Score | None, test: Score | None, card: ModelCard
) -> dict[str, object]:
    """Return the contents of metrics.json."""
    trainer, settings = model.trainer, run.settings
    accelerator = trainer.strategy.root_device.type
    if accelerator == "cuda":
        accelerator = "gpu"
    metrics: dict[str, object] = {
        "recipe": settings.get("recipe"),
        "net": model.hparams["net"],
        "dataset": data.dataset,
        "seed": settings.get("seed_everything"),
        "epochs": None,
        "accelerator": accelerator,
        "processor": processor(accelerator),
        "devices": trainer.world_size,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "batch_size": data.batch_size,
        "data": None,
        "parameters": sum(parameter.numel() for parameter in model.net.parameters()),
        "train_seconds": None,
        "images_per_second": None,
        "test_seconds": None,
        "val": None,
        "test": None,
        "changes": run.changes,
        "versions": versions(),
    }
    clock = run.clock
    if run.trains:
        metrics["epochs"] = trainer.current_epoch
        metrics["data"] = data_record(data)
        metrics["train_seconds"] = round(clock.seconds, 3)
        if clock.training_seconds:
            metrics["images_per_second"] = round(clock.images / clock.training_seconds, 1)
    if clock.test_seconds is not None:
        metrics["test_seconds"] = round(clock.test_seconds, 3)
    if val:
        metrics["val"] = {**val.values, "interval": accuracy_interval(val)}
    if test:
        metrics["test"] = _test_scores(model, data, test, card)
    return metrics


def _test_scores(model: ImageClassifier, data: ImageData, test: Score, card: ModelCard) -> dict[str, object]:
    per_class = {name: round(accuracy, 6) for name, accuracy in zip(data.classes, test.per_class, strict=True)}
    scores: dict[str, object] = {**test.values, "images": test.images}
    scores |= {"interval": accuracy_interval(test), "per_class": per_class}
    if views := model.views_score:
        scores["tta"] = {"views": model.hparams["tta"], "accuracy": views.accuracy, "loss": views.loss}
    if model.predictions is not None:
        scores["calibration"] = calibration_of(model.predictions, card.temperature)
        probabilities = tempered(model.predictions["probabilities"], card.temperature)
        labels = model.predictions["labels"]
        held_out = None
        if len(data.split[1]) >= MIN_HELD_OUT:  # else the card's scores are those of these test images
            held_out = card.coverage
        scores["coverage"] = measured_coverage(probabilities, labels, held_out, data.classes)
        columns, sets = data.test_images.columns, None
        if columns:
            sets = measured_sets(probabilities, labels, held_out, COVERED)
        scores["groups"] = group_results(columns, probabilities, labels, sets)
    scores["fingerprint"] = fingerprint(data.test_images.images, data.test_images.labels)
    return scores


def accuracy_interval(score: Score) -> list[float] | None:
    """Return Wilson's 95 % interval of the accuracy; None without images."""
    counts = torch.tensor(score.confusion)
    correct, images = int(counts.diag().sum()), int(counts.sum())
    if not images:
        return None
    low, high = wilson_interval(correct, images)
    return [round(low, 6), round(high, 6)]


def calibration_of(predictions: Predictions, temperature: float | None) -> dict[str, float | None]:
    """Return the expected calibration error without (`error`) and with a temperature (`tempered_error`)."""

    def error(probabilities: Tensor) -> float:
        table = prediction_table({**predictions, "probabilities": probabilities})
        return round(expected_calibration_error(reliability(table.probability, table.hits)), 6)

    probabilities = predictions["probabilities"]
    tempered_error = None
    if temperature is not None:
        tempered_error = error(tempered(probabilities, temperature))
    return {"error": error(probabilities), "temperature": temperature, "tempered_error": tempered_error}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    packages = {package: version(package) for package in ("torch", "torchvision", "lightning", "torchmetrics")}
    return {"python": platform.python_version(), **packages, "cifar-lit": cifar_lit.__version__}


def write_metrics(run: Path, metrics: Mapping[str, object]) -> None:
    """Write metrics.json, which marks the run as finished. NaN and infinity, from a diverged net, become null."""

    def without_nan(value: object) -> object:
        if isinstance(value, dict):
            return {name: without_nan(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [without_nan(inner) for inner in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    write_text(run / "metrics.json", json.dumps(without_nan(metrics), indent=2, ensure_ascii=False) + "\n")


def log_pictures(
    run: Run,
    val: Score | None,
    test: Score | None,
    predictions: Predictions | None,
    data: ImageData,
    step: int,
) -> None:
    """Log confusion matrices, and galleries of mistakes and doubtful predictions.

    predictions: those of the test, or of the validation if there was no test. None draws no galleries.
    """
    pictures: dict[str, Tensor] = {}
    if val and val.images:
        pictures["val/confusion_matrix"] = confusion_matrix(torch.tensor(val.confusion), data.classes)
        if predictions is not None and test is None:
            pictures |= _galleries("val", predictions, data.train_images.images, data.classes)
    if test and test.images:
        pictures["test/confusion_matrix"] = confusion_matrix(torch.tensor(test.confusion), data.classes)
        if predictions is not None:
            pictures |= _galleries("test", predictions, data.test_images.images, data.classes)
    for board in run.boards:
        for tag, picture in pictures.items():
            board.log_images(tag, picture, step)
        board.save()


def _galleries(stage: str, predictions: Predictions, images: Tensor, classes: Sequence[str]) -> dict[str, Tensor]:
    table = prediction_table(predictions)
    mistakes, doubtful = table.confident_mistakes(GALLERY_SIZE), table.doubtful_hits(GALLERY_SIZE)
    return {
        f"{stage}/confident_mistakes": gallery(images[table.indices[mistakes]], captions(table, mistakes, classes)),
        f"{stage}/doubtful_hits": gallery(images[table.indices[doubtful]], captions(table, doubtful, classes)),
    }


def write_report(run: Path, metrics: dict[str, object], predictions: Predictions, data: ImageData) -> None:
    """Write report.html without the pass over the training images. `cifar-lit report` adds its findings."""
    write_text(run / "report.html", render(run, metrics, data, prediction_table(predictions)))
