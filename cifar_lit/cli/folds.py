"""`train --folds 5`: cross-validation, which tests every image once with a net that was not trained on it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import Command
from cifar_lit.cli.launch import logs_of
from cifar_lit.cli.several import check_one_device, check_several, show_runs, train_each
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError
from cifar_lit.files import write_text
from cifar_lit.runs.label_errors import LIST, rank_labels, write_ranking
from cifar_lit.runs.predictions import write_predictions
from cifar_lit.runs.run_folder import RunFolder, display_path, read_metrics
from cifar_lit.stats import mean_interval, wilson_interval
from cifar_lit.text import say

FIGURES = ("accuracy", "balanced_accuracy", "macro_f1")


def train_folds(command: Command) -> None:
    """Train once per fold, and write the combined results to a folder of their own."""
    folds = check_folds(command)
    parts: list[Mapping[str, Tensor]] = []
    last: dict[str, Any] = {}

    def collect(cli: TrainingCLI) -> None:
        """Keep the predictions for the fold, and the images, equal in all trainings."""
        data = cli.datamodule
        if (predictions := cli.model.predictions) is not None:
            parts.append({**predictions, "indices": data.parts.fold_rows[predictions["indices"]]})
        last.update(images=data.train_images, recipe=cli.run.settings["recipe"] or "custom")

    trainings = {}
    for fold in range(folds):
        trainings[f"fold {fold + 1} of {folds}"] = {"data.split.folds": folds, "data.split.fold": fold}
    paths = train_each(command, trainings, after=collect)
    runs = [(display_path(path), read_metrics(path)["test"]) for path in paths]
    folder = RunFolder(logs_of(command), f"{last['recipe']}-folds")
    try:
        finish(folder.path, runs, parts, last["images"])
    finally:
        folder.release()


def check_folds(command: Command) -> int:
    """Return the number of folds; raise UsageError for flags that are incompatible with a cross-validation."""
    text = command.several["folds"]
    check_one_device(command.value("trainer.devices"), "--folds trains")
    remedy = "starts new trainings: leave --resume out, or resume one of its runs without --folds"
    check_several(command, "--folds", remedy)
    if not re.fullmatch(r"[0-9]{1,3}", text) or int(text) < 2:
        raise UsageError(f"--folds must be a number of at least 2, such as 5, not {text!r}")
    return int(text)


def finish(
    folder: Path, runs: Sequence[tuple[str, dict[str, Any]]], parts: Sequence[Mapping[str, Tensor]], images: ImageSet
) -> None:
    """Write folds.json, predictions.csv and label_errors.csv, and print the results.

    runs: run folder and test metrics of each fold.
    parts: `indices` (rows of `images`), `labels` and `probabilities` of the test images of each fold.
    """
    count = write_predictions(folder / "predictions.csv", parts, images)
    order = torch.cat([part["indices"] for part in parts]).argsort()  # each image is in one fold
    probabilities = torch.cat([part["probabilities"] for part in parts])[order].float()
    correct = int((probabilities.argmax(1) == images.labels).sum())
    low, high = wilson_interval(correct, count)
    spreads, values = {}, {}
    for name in FIGURES:
        spread = mean_interval([test[name] for _, test in runs])
        spreads[name] = spread
        values[name] = {"n": spread["n"], "mean": spread["mean"], "std": spread["std"]}
    ranking = rank_labels(images.labels, probabilities)
    write_ranking(folder / LIST, images, ranking, ["test"] * len(images))
    suspects = ranking.suspects
    combined = {"accuracy": correct / count, "interval": [low, high], "images": count, "suspected_labels": suspects}
    metrics = {"folds": [path for path, _ in runs], "test": combined, **values}
    write_text(folder / "folds.json", json.dumps(metrics, indent=2) + "\n")

    show_runs("test results of each fold", "fold", dict(runs), [*FIGURES, "images"], spreads)
    say(
        f"{suspects} of {count} predictions contradict the label: {display_path(folder)}/{LIST}",
        f"95 % interval of the accuracy {low:.4f} … {high:.4f}",
        f"accuracy over all folds {correct / count:.4f} · {count} images",
        f"results {display_path(folder)}",
        "",
        "next:",
        f"  cifar-lit review {shlex.quote(display_path(folder))}",
    )
