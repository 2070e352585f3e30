"""`train --folds 5`: a cross-validation, in which every image is tested on once, by a net that was not trained on it."""

from __future__ import annotations

import csv
import gc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from cifar_lit.cli.console import for_tables
from cifar_lit.cli.fit import TrainingCLI
from cifar_lit.cli.flags import Command, check_one_device
from cifar_lit.cli.launch import logs_of
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import atomic_write, write_text
from cifar_lit.runs.label_errors import rank_suspects
from cifar_lit.runs.predictions import write_predictions
from cifar_lit.runs.run_folder import RunFolder, display_path, read_metrics
from cifar_lit.stats import mean_interval, wilson_interval
from cifar_lit.text import csv_cell, say

FIGURES = ("accuracy", "balanced_accuracy", "macro_f1")


def train_folds(command: Command) -> None:
    """Trains once for each fold, then writes what all say together into a folder of its own; raises UsageError, Failure."""
    folds = check_folds(command)
    runs: list[tuple[str, dict[str, Any]]] = []
    parts: list[Mapping[str, Tensor]] = []
    for fold in range(folds):
        say(
            "" if fold else f"{folds} trainings, each tested on a part that it was not trained on",
            f"fold {fold + 1} of {folds}",
        )
        one = replace(command, folds=None, flags=[*command.flags, f"--data.folds={folds}", f"--data.fold={fold}"])
        cli = TrainingCLI(one)
        data, predictions = cli.datamodule, cli.model.predictions
        if predictions is None:
            raise Failure("a training of a cross-validation ended without a test: leave flags out that cut it short")
        path = cli.run.folder.path
        parts.append({**predictions, "indices": data.parts.fold_rows[predictions["indices"]]})
        runs.append((display_path(path), read_metrics(path)["test"]))
        recipe, images = cli.run.settings["recipe"] or "custom", data.train_images
        del cli, data
        gc.collect()  # net and Trainer refer to each other, and would keep the device's memory
    folder = RunFolder(logs_of(command), f"{recipe}-folds", None, True)
    try:
        finish(folder.path, runs, parts, images)
    finally:
        folder.release()


def check_folds(command: Command) -> int:
    """How many folds are asked for; raises UsageError for what a cross-validation cannot be made of."""
    text = command.folds or ""
    if command.name != "train":
        raise UsageError(
            f"--folds trains and tests, so it goes with `train` or scripts/train.py, not with `{command.name}`"
        )
    if not re.fullmatch(r"[0-9]{1,3}", text) or int(text) < 2:
        raise UsageError(f"--folds is a number of parts from 2 on, such as 5, not {text!r}")
    if command.resume is not None:
        raise UsageError(
            "--folds starts new trainings: leave --resume out, or go on with one of its runs without --folds"
        )
    if command.value("trainer.num_nodes") not in (None, "1"):
        raise UsageError("--folds trains on one machine: leave --nodes out")
    devices = command.value("trainer.devices")
    check_one_device(devices, "--folds trains")
    if devices is None:  # further processes would each start a cross-validation of their own
        command.flags.append("--trainer.devices=1")
    return int(text)


def finish(
    folder: Path, runs: Sequence[tuple[str, dict[str, Any]]], parts: Sequence[Mapping[str, Tensor]], images: ImageSet
) -> None:
    """Writes folds.json, predictions.csv and label_errors.csv, and prints the table.

    Args:
        runs: the folder and the test's metrics of each fold.
        parts: `indices` (rows of `images`), `labels` and `probabilities` of each fold's test images.
    """
    count = write_predictions(folder / "predictions.csv", images.classes, parts, images.names)
    indices, labels, probabilities = (
        torch.cat([part[name] for part in parts]) for name in ("indices", "labels", "probabilities")
    )
    right = int((probabilities.argmax(1) == labels).sum())
    low, high = wilson_interval(right, count)
    values = {name: mean_interval([test[name] for _, test in runs]) for name in FIGURES}
    suspects = write_label_errors(folder / "label_errors.csv", images, indices, labels, probabilities)
    together = {"accuracy": right / count, "interval": [low, high], "images": count, "suspected_labels": suspects}
    metrics = {"folds": [path for path, _ in runs], "test": together, **values}
    write_text(folder / "folds.json", json.dumps(metrics, indent=2) + "\n")

    columns = (Column(name.replace("_", " "), justify="right") for name in (*FIGURES, "images"))
    table = Table("fold", *columns, title="test figures of each fold", title_justify="left", title_style="")
    for path, test in runs:
        table.add_row(path, *(f"{test[name]:.4f}" for name in FIGURES), str(test["images"]))
    for name in ("mean", "std"):
        table.add_row(name, *(f"{values[figure][name]:.4f}" for figure in FIGURES), "")
    for_tables().print(table)
    say(
        f"{suspects} of {count} labels are to be looked at: {display_path(folder)}/label_errors.csv",
        f"accuracy {right / count:.4f} ({low:.4f} … {high:.4f}) · {count} images, each tested on by a net that has not seen it",
        f"all of them {display_path(folder)}",
    )


def write_label_errors(path: Path, images: ImageSet, indices: Tensor, labels: Tensor, probabilities: Tensor) -> int:
    """The labels that the nets reject, the worst first, as a table; how many there are. See `label_errors.suspect_labels`."""
    ranking = rank_suspects(labels, probabilities.float())
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["index", "path", "label", "probability_of_label", "suggested", "probability_of_suggested", "confident"]
        )
        for row, confident in zip(ranking.rows.tolist(), ranking.confident.tolist(), strict=True):
            index = int(indices[row])
            names = [images.names[index] if images.names else "", images.classes[labels[row]]]
            cells = [*map(csv_cell, names), f"{ranking.own[row]:.6f}", csv_cell(images.classes[ranking.suggested[row]])]
            writer.writerow([index, *cells, f"{ranking.best[row]:.6f}", "yes" if confident else "no"])
    return len(ranking.rows)
