"""Results of a run: metrics.json, pictures, and report.html."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.files import write_text
from cifar_lit.runs.calibration import expected_calibration_error, reliability, tempered
from cifar_lit.runs.data_record import data_record
from cifar_lit.runs.figures import GALLERY_SIZE, confusion_matrix, gallery
from cifar_lit.runs.predictions import fingerprint, prediction_table
from cifar_lit.runs.report import captions, render
from cifar_lit.runs.run import Run
from cifar_lit.stats import wilson_interval
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Score

Predictions = Mapping[str, Tensor]  # `ImageClassifier.predictions`


def run_metrics(
    run: Run, model: ImageClassifier, data: ImageData, val: Score | None, test: Score | None, temperature: float | None
) -> dict[str, Any]:
    """Return the contents of metrics.json. temperature: from the model card."""
    trainer, settings = model.trainer, run.settings
    clock = run.clock if run.trains else None
    speed = round(clock.images / clock.training_seconds, 1) if clock and clock.training_seconds else None
    device_type = trainer.strategy.root_device.type
    metrics: dict[str, Any] = {
        "recipe": settings.get("recipe"),
        "net": model.hparams["net"],
        "dataset": data.dataset,
        "seed": settings.get("seed_everything"),
        "epochs": trainer.current_epoch if clock else None,
        "accelerator": "gpu" if device_type == "cuda" else device_type,
        "devices": trainer.world_size,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
        "batch_size": data.batch_size,
        "data": data_record(data) if clock else None,
        "parameters": sum(parameter.numel() for parameter in model.net.parameters()),
        "train_seconds": round(clock.seconds, 3) if clock else None,
        "images_per_second": speed,
        "test_seconds": None if run.clock.test_seconds is None else round(run.clock.test_seconds, 3),
        "val": {**val.values, "interval": accuracy_interval(val)} if val else None,
        "test": None,
        "changes": run.changes,
        "versions": versions(),
    }
    if test:
        per_class = {name: round(accuracy, 6) for name, accuracy in zip(data.classes, test.per_class, strict=True)}
        interval = accuracy_interval(test)
        scores: dict[str, Any] = {**test.values, "images": test.images, "interval": interval, "per_class": per_class}
        if views := model.views_score:
            scores["tta"] = {"views": model.hparams["tta"], "accuracy": views.accuracy, "loss": views.loss}
        if model.predictions is not None:
            scores["calibration"] = calibration_of(model.predictions, temperature)
        metrics["test"] = {**scores, "fingerprint": fingerprint(data.test_images.images, data.test_images.labels)}
    return metrics


def accuracy_interval(score: Score) -> list[float] | None:
    """Return Wilson's 95 % interval of the accuracy; None without images."""
    correct = sum(row[label] for label, row in enumerate(score.confusion))
    images = sum(map(sum, score.confusion))
    return [round(bound, 6) for bound in wilson_interval(correct, images)] if images else None


def calibration_of(predictions: Predictions, temperature: float | None) -> dict[str, float | None]:
    """Return the expected calibration error without (`error`) and with a temperature (`tempered_error`)."""

    def error(probabilities: Tensor) -> float:
        table = prediction_table({**predictions, "probabilities": probabilities})
        return round(expected_calibration_error(reliability(table.probability, table.hits)), 6)

    probabilities = predictions["probabilities"]
    after = None if temperature is None else error(tempered(probabilities, temperature))
    return {"error": error(probabilities), "temperature": temperature, "tempered_error": after}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    packages = {package: version(package) for package in ("torch", "torchvision", "lightning", "torchmetrics")}
    return {"python": platform.python_version(), **packages, "cifar-lit": cifar_lit.__version__}


def write_metrics(run: Path, metrics: Mapping[str, Any]) -> None:
    """Write metrics.json, which marks the run as finished. NaN and infinity, from a diverged net, become null."""

    def without_nan(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nan(inner) for name, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

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
    for stage, score in (("val", val), ("test", test)):
        if score is None or not score.images:
            continue
        matrix = torch.tensor(score.confusion)
        pictures[f"{stage}/confusion_matrix"] = confusion_matrix(matrix, data.classes)
        if predictions is not None and (stage == "test" or test is None):
            table = prediction_table(predictions)
            images = (data.test_images if stage == "test" else data.train_images).images
            galleries = {"confident_mistakes": table.confident_mistakes, "doubtful_hits": table.doubtful_hits}
            for name, choose in galleries.items():
                rows = choose(GALLERY_SIZE)
                picture = gallery(images[table.indices[rows]], captions(table, rows, data.classes))
                pictures[f"{stage}/{name}"] = picture
    for board in run.boards:
        for tag, picture in pictures.items():
            board.log_images(tag, picture, step)
        board.save()


def write_report(run: Path, metrics: dict[str, Any], predictions: Predictions, data: ImageData) -> None:
    """Write report.html without the pass over the training images. `cifar-lit report` adds its findings."""
    write_text(run / "report.html", render(run, metrics, data, prediction_table(predictions)))
