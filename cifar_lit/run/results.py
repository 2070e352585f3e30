"""The contents of metrics.json: how the run was made, its data, and what its predictions are worth."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from shutil import which

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

import cifar_lit
from cifar_lit.base.hardware import processor
from cifar_lit.base.settings import without_passwords
from cifar_lit.base.stats import SIGNIFICANT, binomial_tail, holm, wilson_interval
from cifar_lit.base.text import natural_key, quoted
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.split import TEST, image_hashes, label_hashes
from cifar_lit.inference.calibration import expected_calibration_error, perfect_error, reliability, tempered
from cifar_lit.inference.model_file import ModelCard
from cifar_lit.inference.sets import Scores, measured_coverage
from cifar_lit.run.label_results import label_results
from cifar_lit.run.record import GroupResult
from cifar_lit.run.run import Run
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.score import Score


@dataclass(frozen=True)
class Tested:
    """Results of a pass over the validation or test images.

    Args:
        score: scores without test-time augmentation.
        views: `views`, `accuracy` and `loss` with test-time augmentation; None without it.
        predictions: `ImageClassifier.predictions` of this pass.
    """

    score: Score
    views: Mapping[str, object] | None = None
    predictions: Mapping[str, Tensor] | None = None


def run_metrics(run: Run, trainer: pl.Trainer, model: ImageClassifier, data: ImageData) -> dict[str, object]:
    """Return the contents of metrics.json, without scores."""
    settings, clock = run.settings, run.clock
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
        "changes": model.changes,
        "tested": run.folder.tested,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": typed_command(),
        "commit": commit(),
        "versions": versions(),
    }
    if run.trains:
        metrics["epochs"] = trainer.current_epoch
        metrics["data"] = data_record(data)
        metrics["train_seconds"] = round(clock.seconds, 3)
        if clock.training_seconds:
            metrics["images_per_second"] = round(clock.images / clock.training_seconds, 1)
    if clock.test_seconds is not None:
        metrics["test_seconds"] = round(clock.test_seconds, 3)
    return metrics


def val_scores(val: Score) -> dict[str, object]:
    """Return the `val` part of metrics.json."""
    return {**val.values, "interval": accuracy_interval(val)}


def test_scores(test: Tested, images: ImageSet, card: ModelCard, held_out: Scores | None) -> dict[str, object]:
    """Return the `test` part of metrics.json.

    Args:
        images: test images.
        card: the temperature of the model.
        held_out: scores of other images for prediction sets, see `held_out_scores`.
    """
    score = test.score
    per_class = {name: round(accuracy, 6) for name, accuracy in zip(images.classes, score.per_class, strict=True)}
    scores: dict[str, object] = {**score.values, "images": score.images}
    scores |= {"interval": accuracy_interval(score), "per_class": per_class}
    scores["fingerprint"] = fingerprint(images.images, images.labels)
    if test.views:
        scores["tta"] = test.views
    if test.predictions is not None:
        probabilities, labels = test.predictions["probabilities"], test.predictions["labels"]
        scores["groups"] = group_results(images.columns, card.task.hits(probabilities.logit(), labels))
        if card.thresholds is not None:
            return scores | label_results(probabilities, labels, card.thresholds, images.classes)
        scores["calibration"] = calibration_of(probabilities, labels, card)
        probabilities = tempered(probabilities, card.temperature)
        scores["coverage"] = measured_coverage(probabilities, labels, held_out)
    return scores


def accuracy_interval(score: Score) -> list[float] | None:
    """Return Wilson's 95 % interval of the accuracy; None without images."""
    if not score.images:
        return None
    low, high = wilson_interval(round(score.accuracy * score.images), score.images)
    return [round(low, 6), round(high, 6)]


def calibration_of(probabilities: Tensor, labels: Tensor, card: ModelCard) -> dict[str, object]:
    """Return the `calibration` part of `test`: expected calibration errors, and those of a perfectly calibrated net.

    probabilities: (N, classes), without temperature. labels: int64 (N,).
    """
    error, perfect = _calibration_errors(probabilities, labels)
    calibration: dict[str, object] = {"error": error, "perfect": perfect, "temperature": card.temperature}
    calibration["source"] = card.temperature_source
    error, perfect = None, None
    if card.temperature is not None:
        error, perfect = _calibration_errors(tempered(probabilities, card.temperature), labels)
    return calibration | {"tempered_error": error, "tempered_perfect": perfect}


def _calibration_errors(probabilities: Tensor, labels: Tensor) -> tuple[float | None, dict[str, float] | None]:
    highest, predicted = probabilities.max(1)
    error = expected_calibration_error(reliability(highest, predicted == labels))
    return round(error, 6), perfect_error(highest)


def typed_command() -> str:
    """Return the command line of this process without passwords."""
    program = Path(sys.argv[0]).name.replace("__main__.py", "cifar-lit")
    return without_passwords(quoted(program, *sys.argv[1:]))


def commit() -> str | None:
    """Return the Git commit of this package, with + if files have changed; None if it is installed without Git."""
    checkout = Path(cifar_lit.__file__).parents[1]
    if not (checkout / ".git").exists() or which("git") is None:
        return None
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    packages = {package: version(package) for package in ("torch", "torchvision", "lightning", "torchmetrics")}
    return {"python": platform.python_version(), **packages, "cifar-lit": cifar_lit.__version__}


def group_results(columns: Mapping[str, Sequence[str]], hits: Tensor) -> dict[str, list[GroupResult]]:
    """Return the results of each value of each column.

    Groups that are worse than all images by more than chance come first. The others cannot be told from them, and
    follow by their values.

    Args:
        columns: value of each image by the name of the column.
        hits: whether each prediction is correct, bool (N,).
    """
    results = {}
    overall = float(hits.double().mean())
    for name, values in columns.items():
        rows_of: dict[str, list[int]] = {}
        for row, value in enumerate(values):
            rows_of.setdefault(value, []).append(row)
        groups: list[GroupResult] = []
        for value in sorted(rows_of, key=natural_key):
            rows = rows_of[value]
            count, correct = len(rows), int(hits[rows].sum())
            low, high = wilson_interval(correct, count)
            interval = [round(low, 6), round(high, 6)]
            p = binomial_tail(correct, count, overall)
            accuracy = round(correct / count, 6)
            groups.append(GroupResult(value=value, images=count, accuracy=accuracy, interval=interval, p=p))
        for group, p in zip(groups, holm([group["p"] for group in groups]), strict=True):
            group["p"] = p
        results[name] = sorted(groups, key=lambda group: min(group["p"], SIGNIFICANT))
    return results


def data_record(data: ImageData) -> dict[str, object]:
    """Return SHA-256 fingerprints of images, labels and split, and the numbers of images and classes.

    Each image is identified by its pixels. So a fingerprint does not depend on the order, names or place of the files,
    and other labels change only that of the labels, unless a split by seed changes with them.
    """
    images, labels, split = [], [], []  # uint64 (N,), a key per image
    for image_set, sides in data.parts.sides():
        images.append(image_hashes(image_set))
        labels.append(label_hashes(image_set))
        split.append(sides.numpy().astype(np.uint64))
    train, val = data.split
    return {
        "images": _fingerprint(images, images),
        "labels": _fingerprint(images, labels),
        "split": _fingerprint(images, split),
        "train": len(train),
        "val": len(val),
        "test": int((np.concatenate(split) == TEST).sum()),
        "classes": data.class_count,
    }


def _fingerprint(images: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of the pairs of an image's key and its value, in the order of the keys."""
    pairs = np.stack([np.concatenate(images), np.concatenate(values)])
    return sha256(pairs[:, np.lexsort(pairs[::-1])].tobytes()).hexdigest()


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """Return the SHA-256, in hex, of images, uint8 (N, H, W, C), and labels, int64 (N,)."""
    digest = sha256()
    for part in (*images.split(1024), labels):  # in parts, because the images may be memory-mapped
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()
