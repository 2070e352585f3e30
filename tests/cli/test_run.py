"""One small training from the command line: what it prints, and the files of its run folder."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import pytest
import torch
from command_line import Typed, files_of, metrics_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_lit.data.datamodule import ImageData
from cifar_lit.models.registry import build_net
from cifar_lit.runs.loggers import COLUMNS
from cifar_lit.runs.predictions import fingerprint, read_predictions
from cifar_lit.training.checkpoint import read_checkpoint


@pytest.fixture
def answer(training: tuple[Path, Typed]) -> Typed:
    """What the training printed."""
    return training[1]


def test_a_run_folder_holds_exactly_what_is_promised(run: Path) -> None:
    assert files_of(run) == [
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "config.yaml",
        "events.out.tfevents.*",
        "metrics.csv",
        "metrics.json",
        "model.safetensors",
        "predictions.csv",
        "probabilities.npy",
        "report.html",
    ]


def test_metrics_json_has_its_keys_in_order_and_plain_facts(run: Path) -> None:
    metrics = metrics_of(run)
    assert list(metrics) == [
        "recipe", "net", "dataset", "seed", "epochs", "accelerator", "devices", "precision", "batch_size", "parameters",
        "train_seconds", "images_per_second", "val", "test", "versions",
    ]  # fmt: skip
    net = build_net("lenet", channels=3, image_size=16, num_classes=4)
    facts = {
        "recipe": "small", "net": "lenet", "dataset": "shapes", "seed": 3, "epochs": 2, "accelerator": "cpu", "devices": 1,
        "precision": "32-true", "batch_size": 32, "parameters": sum(tensor.numel() for tensor in net.parameters()),
    }  # fmt: skip
    assert {name: metrics[name] for name in facts} == facts
    assert {"torch", "lightning", "cifar-lit", "python"} <= set(metrics["versions"])
    assert torch.__version__.startswith(metrics["versions"]["torch"])


def test_the_test_entry_counts_every_image_once_and_agrees_with_itself(run: Path, data: ImageData) -> None:
    test = metrics_of(run)["test"]
    assert list(test) == ["accuracy", "loss", "images", "per_class", "fingerprint"]
    assert test["fingerprint"] == fingerprint(data.test_images.images, data.test_images.labels)
    assert test["images"] == len(data.test_images) == 40
    counts = torch.bincount(data.test_images.labels).tolist()
    assert list(test["per_class"]) == list(data.classes)
    hits = [accuracy * count for accuracy, count in zip(test["per_class"].values(), counts, strict=True)]
    assert sum(hits) / 40 == pytest.approx(test["accuracy"])
    assert 0 < test["loss"] < 10


def test_predictions_csv_holds_each_test_image_once_and_its_hits_are_the_accuracy(run: Path, data: ImageData) -> None:
    outcomes = read_predictions(run / "predictions.csv", data.classes)
    assert outcomes is not None
    assert outcomes.indices.tolist() == list(range(40))
    assert torch.equal(outcomes.labels, data.test_images.labels)
    assert float(outcomes.hits.double().mean()) == metrics_of(run)["test"]["accuracy"]


def test_times_and_rate_fit_together(run: Path) -> None:
    metrics = metrics_of(run)
    trained = 160 * metrics["epochs"]
    # the rate leaves validation out, so that it is at least the images over the whole time
    assert metrics["images_per_second"] >= 0.99 * trained / metrics["train_seconds"]
    assert 0 < metrics["train_seconds"] < 60


def test_the_validation_entry_is_the_best_epochs(run: Path) -> None:
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val/accuracy"]]
    best = max(rows, key=lambda row: float(row["val/accuracy"]))
    assert metrics_of(run)["val"] == {"accuracy": float(best["val/accuracy"]), "loss": float(best["val/loss"])}
    assert read_checkpoint(run / "checkpoints/best.ckpt")["epoch"] == int(best["epoch"])


def test_metrics_csv_holds_the_curves(run: Path) -> None:
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    steps = {name: [int(row["step"]) for row in rows if row[name]] for name in COLUMNS[2:]}
    assert steps == {
        "lr": [5, 10], "weight_norm": [5, 10], "train/loss": [5, 10], "train/accuracy": [5, 10],
        "val/loss": [5, 10], "val/accuracy": [5, 10], "test/loss": [10], "test/accuracy": [10],
    }  # fmt: skip
    assert float(rows[-1]["test/accuracy"]) == metrics_of(run)["test"]["accuracy"]


def test_the_console_ends_with_table_result_time_folder_and_next_commands(answer: Typed, run: Path, data: ImageData) -> None:
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    metrics = metrics_of(run)
    at = next(number for number, line in enumerate(lines) if line.startswith("test accuracy 0."))
    test = metrics["test"]
    assert lines[at] == f"test accuracy {test['accuracy']:.4f} · loss {test['loss']:.4f} · 40 images"
    assert lines[at + 1] == f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second']:.0f} images/s"
    assert lines[at + 2] == "run lightning_logs/small-1"
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[:at] if line.startswith("│")]
    assert [row[:2] for row in table] == [[name, f"{accuracy:.4f}"] for name, accuracy in test["per_class"].items()]
    following = lines[at + 3 :]
    assert following[:2] == ["", "next:"]
    assert following[2:4] == ["  tensorboard --logdir lightning_logs", "  cifar-lit report lightning_logs/small-1 --open"]
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert "\r" not in answer.out
    assert "\x1b" not in answer.out


def test_the_next_commands_can_be_typed_as_they_stand(answer: Typed, run: Path) -> None:
    load = next(line.strip() for line in answer.out.splitlines() if "cifar_lit.load" in line)
    program, _, code = load.partition(" -c ")
    assert program == "python"
    code = subprocess.run(["bash", "-c", f"printf %s {code}"], capture_output=True, text=True, check=True).stdout
    assert code == "import cifar_lit; print(cifar_lit.load('lightning_logs/small-1'))"


def test_the_start_card_tells_what_runs(answer: Typed) -> None:
    card = dict(re.findall(r"^(\w+) {2,}(.*)$", answer.out, re.MULTILINE))
    assert card["data"] == "shapes · train 160 · validation 40 · 4 classes · 3×16×16 · in the memory of cpu"
    assert card["devices"] == "1 × cpu"
    assert card["precision"] == "32-true"
    assert card["batch"].startswith("32 = 1 × 32 ")
    assert card["run"] == "lightning_logs/small-1"


def test_tensorboard_holds_curves_settings_and_an_image(run: Path) -> None:
    events = EventAccumulator(str(run))
    events.Reload()
    tags = events.Tags()
    curves = {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr", "weight_norm", "test/loss", "test/accuracy"}
    assert set(tags["scalars"]) == curves
    figures = {"confusion_matrix", "accuracy_per_class"}
    galleries = {"confident_mistakes", "doubtful_hits"}
    assert set(tags["images"]) == {
        "images/train",
        *(f"val/{name}" for name in figures),
        *(f"test/{name}" for name in figures | galleries),
    }
    assert [event.step for event in events.Images("test/confusion_matrix")] == [10]
    (image,) = events.Images("images/train")
    assert image.width > 8 * 16
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10]
    (tested,) = events.Scalars("test/accuracy")
    assert tested.value == pytest.approx(metrics_of(run)["test"]["accuracy"])
    settings = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert settings.plugin_name == "hparams"
    for name in (b"recipe", b"small", b"net", b"lenet", b"batch_size"):
        assert name in settings.content
    metrics = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert b"test/accuracy" in metrics
