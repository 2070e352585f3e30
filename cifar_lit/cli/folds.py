"""`train --folds 5`: cross-validation, which tests every image once with a net that was not trained on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path, write_text
from cifar_lit.base.stats import mean_interval, wilson_interval
from cifar_lit.base.text import quoted, say
from cifar_lit.cli.fit import Training
from cifar_lit.cli.flags import Command
from cifar_lit.cli.launch import logs_of
from cifar_lit.cli.several import check_several, mean_text, train_each
from cifar_lit.data.image_set import ImageSet
from cifar_lit.inference.model_file import read_card
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.predictions import write_predictions
from cifar_lit.run.record import read_metrics, score_title
from cifar_lit.runs.label_errors import LIST, listed_images, rank_labels, write_list
from cifar_lit.training.task import task_of

MEANS = ("accuracy", "mean_average_precision", "balanced_accuracy", "macro_f1")  # scores whose mean is printed


def train_folds(command: Command) -> None:
    """Train once per fold, and write the combined results to a folder of their own."""
    text = command.several["folds"]
    if not text.isdecimal() or int(text) < 2:
        raise UsageError(f"--folds must be a number of at least 2, such as 5, not {text!r}")
    check_several(command)
    folds = int(text)
    parts: list[Mapping[str, Tensor]] = []
    images: list[ImageSet] = []  # equal in all trainings

    def collect(training: Training) -> None:
        """Keep the predictions for the fold, and the images."""
        predictions = training.model.predictions
        card = read_card(training.run.folder.path)
        assert predictions is not None and card is not None
        rows = training.data.parts.fold_rows[predictions["indices"]]
        thresholds = torch.tensor(card.thresholds or 0.5).expand_as(predictions["probabilities"])
        parts.append({**predictions, "indices": rows, "thresholds": thresholds})
        images[:] = [training.data.train_images]

    trainings = {}
    for fold in range(folds):
        trainings[f"fold {fold + 1} of {folds}"] = {"data.split.folds": folds, "data.split.fold": fold}
    runs = train_each(command, trainings, after=collect)
    recipe = runs[0].name.rpartition("-")[0]
    folder = RunFolder(logs_of(command), f"{recipe}-folds")
    path = folder.claim()
    try:
        finish(path, runs, parts, images[0])
    finally:
        folder.release()


def finish(folder: Path, runs: Sequence[Path], parts: Sequence[Mapping[str, Tensor]], images: ImageSet) -> None:
    """Write folds.json, predictions.csv and label_errors.csv, and print the results.

    runs: run folder of each fold.
    parts: `indices` (rows of `images`), `labels`, `probabilities` and `thresholds` (each (N, classes)) of the test
        images of each fold.
    """
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = values["indices"].argsort()  # each image is in one fold
    count = write_predictions(folder / "predictions.csv", parts, images, values["thresholds"][order])
    probabilities = values["probabilities"][order].float()
    correct = int(task_of(images.labels).hits(probabilities.logit(), images.labels).sum())
    interval = wilson_interval(correct, count)
    tests = [read_metrics(run)["test"] for run in runs]
    means = {}
    for name in MEANS:
        if name in tests[0]:
            spread = mean_interval([test[name] for test in tests])
            means[name] = {part: spread[part] for part in ("n", "mean", "std")}  # folds share images: no interval
    ranking = rank_labels(images.labels, probabilities)
    write_list(folder, listed_images(images, torch.arange(len(images)), ranking, ["test"] * len(images)))
    accuracy = correct / count
    test = {"accuracy": accuracy, "interval": interval, "images": count, "suspected_labels": ranking.suspects}
    metrics = {"folds": list(map(display_path, runs)), "test": test, **means}
    write_text(folder / "folds.json", json.dumps(metrics, indent=2) + "\n")

    say(
        *(f"{score_title(name)} of the folds {mean_text(spread)}" for name, spread in means.items()),
        f"{ranking.suspects} of {len(ranking.own)} labels contradict the predictions: {display_path(folder)}/{LIST}",
        f"95 % interval of the accuracy {interval[0]:.4f} … {interval[1]:.4f}",
        f"accuracy over all folds {accuracy:.4f} · {count} images",
        f"results {display_path(folder)}",
        "",
        "next:",
        f"  cifar-lit review {quoted(display_path(folder))}",
    )
