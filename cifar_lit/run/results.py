"""Results of a run: metrics.json, pictures, and report.html."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

import cifar_lit
from cifar_lit.base.files import write_text
from cifar_lit.base.hardware import processor
from cifar_lit.base.stats import wilson_interval
from cifar_lit.data.datamodule import ImageData
from cifar_lit.inference.model_file import ModelCard
from cifar_lit.inference.sets import MIN_HELD_OUT, lac_sets, measured_coverage
from cifar_lit.run.card import tempered
from cifar_lit.run.data_record import data_record
from cifar_lit.run.groups import group_results
from cifar_lit.run.predictions import fingerprint, prediction_table
from cifar_lit.run.run import Run
from cifar_lit.runs.figures import as_pixels, confusion_matrix, expected_calibration_error, reliability
from cifar_lit.runs.report import render
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Score

COVERED = 0.95  # coverage of the prediction sets of groups
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
        scores |= _probability_scores(model.predictions, data, card)
    scores["fingerprint"] = fingerprint(data.test_images.images, data.test_images.labels)
    return scores


def _probability_scores(predictions: Predictions, data: ImageData, card: ModelCard) -> dict[str, object]:
    """Return the calibration, the coverage of prediction sets, and the results of the groups of test images."""
    probabilities, labels = tempered(predictions["probabilities"], card.temperature), predictions["labels"]
    held_out = None
    if len(data.split[1]) >= MIN_HELD_OUT:  # else the card's scores are those of these test images
        held_out = card.coverage
    covered, sets = None, lac_sets(probabilities, held_out, COVERED)
    if sets is not None:
        covered = sets.gather(1, labels[:, None])[:, 0]
    return {
        "calibration": calibration_of(predictions, card.temperature),
        "coverage": measured_coverage(probabilities, labels, held_out),
        "groups": group_results(data.test_images.columns, probabilities.argmax(1) == labels, covered),
    }


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
    probabilities, labels = predictions["probabilities"], predictions["labels"]
    tempered_error = None
    if temperature is not None:
        tempered_error = _calibration_error(tempered(probabilities, temperature), labels)
    error = _calibration_error(probabilities, labels)
    return {"error": error, "temperature": temperature, "tempered_error": tempered_error}


def _calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    highest, predicted = probabilities.max(1)
    return round(expected_calibration_error(reliability(highest, predicted == labels)), 6)


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


def log_pictures(run: Run, val: Score | None, test: Score | None, data: ImageData, step: int) -> None:
    """Log the confusion matrices of the scores."""
    for board in run.boards:
        for part, score in (("val", val), ("test", test)):
            if score:
                picture = as_pixels(confusion_matrix(torch.tensor(score.confusion), data.classes))
                board.log_images(f"{part}/confusion_matrix", picture, step)
        board.save()


def write_report(run: Path, metrics: dict[str, object], predictions: Predictions, data: ImageData) -> None:
    """Write report.html without the pass over the training images. `cifar-lit report` adds its findings."""
    write_text(run / "report.html", render(run, metrics, data, prediction_table(predictions)))
