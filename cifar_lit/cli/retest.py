"""`cifar-lit test RUN`: test the stored weights of a run again, and compare with what the run recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Column, Table
from torch import Tensor

from cifar_lit.base.command_line import add_data_dir, add_device, command_parser, parsed
from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import display_path
from cifar_lit.base.hardware import resolve_device
from cifar_lit.base.text import say
from cifar_lit.cli.console import for_tables
from cifar_lit.inference.logits import set_logits
from cifar_lit.inference.model_file import load_model_file
from cifar_lit.run.images import run_image_data
from cifar_lit.run.predictions import read_probabilities
from cifar_lit.run.record import read_metrics
from cifar_lit.run.results import data_record, fingerprint
from cifar_lit.training.metrics import EVALUATIONS
from cifar_lit.training.task import task_of

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

DESCRIPTION = (
    "Test the weights of a run again on the images that the run names, and print each score beside the one in "
    "metrics.json. Exit code 1 if data, predictions or accuracy differ from what the run recorded."
)
MAX_CHANGE = 0.1  # change of a probability: half precision and other devices change it less


def test_again(words: list[str]) -> int:
    """Print recorded and new scores; return 1 if the run recorded something else."""
    parser = command_parser("test RUN", DESCRIPTION)
    add = parser.add_argument
    add("run", type=str, metavar="RUN", help="folder of a run with test results")
    add_data_dir(parser)
    add_device(parser)
    settings = parsed(parser, words)
    run = Path(settings.run).expanduser()
    net = load_model_file(run).on(resolve_device(settings.accelerator))
    metrics = read_metrics(run)
    if not metrics.get("test"):
        remedy = f"cifar-lit test --ckpt_path {display_path(run)}/checkpoints/last.ckpt tests it"
        raise UsageError(f"{display_path(run)} has no test results to compare with: {remedy}")
    data = run_image_data(run, net.card, settings.data_dir)
    images = data.test_images
    logits = set_logits(net, images, torch.arange(len(images)), "testing")
    task = net.card.task
    evaluation = EVALUATIONS[type(task)](len(net.classes))
    evaluation.update(logits, images.labels)
    score = evaluation.compute()
    table = Table("", Column("recorded", justify="right"), Column("now", justify="right"))
    for name, value in score.values.items():
        recorded = metrics["test"].get(name)
        table.add_row(name.replace("_", " "), "–" if recorded is None else f"{recorded:.4f}", f"{value:.4f}")
    for_tables().print(table)
    faults = data_faults(metrics, data)
    if metrics["test"]["fingerprint"] == fingerprint(images.images, images.labels):
        recorded = read_probabilities(run, tuple(logits.shape))
        faults += prediction_faults(metrics["test"]["accuracy"], images.labels, task.probabilities(logits), recorded)
    else:
        faults.append("the run was tested on other images than these data have")
    say(*faults or ["data, predictions and accuracy agree with what the run recorded"])
    return int(len(faults) > 0)


def data_faults(metrics: Mapping[str, Any], data: ImageData) -> list[str]:
    """Return how the data of the training differ from those in metrics.json."""
    recorded, now = metrics["data"], data_record(data)
    for name, what in {"images": "other images", "labels": "other labels", "split": "another split"}.items():
        if recorded[name] != now[name]:
            counts = f"{recorded['train']:,} training images then, {now['train']:,} now"
            return [f"the run used {what} than these data have ({counts})"]
    return []


def prediction_faults(accuracy: float, labels: Tensor, now: Tensor, recorded: Tensor | None) -> list[str]:
    """Return how probabilities.npy and the accuracy in metrics.json differ from those of the weights.

    accuracy: that in metrics.json. labels: those of the test images. now, recorded: probabilities (N, classes).
    """
    count = len(now)
    if recorded is None:
        return ["probabilities.npy is missing, or does not fit the test images"]
    faults = []
    other = int(((now - recorded).abs().amax(1) > MAX_CHANGE).sum())
    if other:
        faults.append(f"{other:,} of {count:,} predictions in probabilities.npy are not those of model.safetensors")
    accuracy_then = float(task_of(labels).hits(recorded.logit(), labels).double().mean())
    if abs(accuracy_then - accuracy) > 0.5 / count:
        faults.append(f"metrics.json has accuracy {accuracy:.4f}, probabilities.npy has {accuracy_then:.4f}")
    return faults
