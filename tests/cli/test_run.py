"""One small training from the command line: what it prints, and the files of its run folder."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest
import torch
from command_line import Typed, files_of, metrics_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cifar_lit.data.datamodule import ImageData
from cifar_lit.runs.loggers import COLUMNS
from cifar_lit.runs.predictions import fingerprint, read_predictions


@pytest.fixture
def answer(training: tuple[Path, Typed]) -> Typed:
    """What the training printed."""
    return training[1]


def test_a_run_folder_holds_exactly_what_is_promised(run: Path) -> None:
    assert files_of(run) == [
        *("checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml", "events.out.tfevents.*", "metrics.csv"),
        *("metrics.json", "model.safetensors", "predictions.csv", "probabilities.npy", "report.html"),
    ]


def test_the_test_counts_every_image_once_and_agrees_with_its_predictions(run: Path, data: ImageData) -> None:
    test = metrics_of(run)["test"]
    assert list(test) == ["accuracy", "loss", "images", "per_class", "fingerprint"]
    assert test["fingerprint"] == fingerprint(data.test_images.images, data.test_images.labels)
    rows = read_predictions(run / "predictions.csv", data.classes)
    assert rows is not None
    assert rows.indices.tolist() == list(range(40))
    assert torch.equal(rows.labels, data.test_images.labels)
    assert float(rows.hits.double().mean()) == test["accuracy"]


def test_metrics_csv_holds_a_row_an_epoch_and_the_best_one_is_the_validation_entry(run: Path) -> None:
    with (run / "metrics.csv").open(newline="") as file:
        curves = list(csv.DictReader(file))
    assert tuple(curves[0]) == COLUMNS
    steps = {name: [int(row["step"]) for row in curves if row[name]] for name in COLUMNS[2:]}
    assert steps == {name: [10] if name.startswith("test/") else [5, 10] for name in COLUMNS[2:]}
    best = max((row for row in curves if row["val/accuracy"]), key=lambda row: float(row["val/accuracy"]))
    assert metrics_of(run)["val"] == {"accuracy": float(best["val/accuracy"]), "loss": float(best["val/loss"])}


def test_the_start_card_tells_what_runs(answer: Typed) -> None:
    card = dict(re.findall(r"^(\w+) {2,}(.*)$", answer.out, re.MULTILINE))
    assert card["data"] == "shapes · train 160 · validation 40 · 4 classes · 3×16×16 · in the memory of cpu"
    assert (card["devices"], card["precision"], card["run"]) == ("1 × cpu", "32-true", "lightning_logs/small-1")
    assert card["batch"].startswith("32 = 1 × 32 ")


def test_the_console_ends_with_table_result_time_folder_and_commands_to_be_typed(answer: Typed, run: Path) -> None:
    assert (answer.code, answer.err) == (0, "")
    lines, metrics = answer.out.splitlines(), metrics_of(run)
    at = next(number for number, line in enumerate(lines) if line.startswith("test accuracy 0."))
    test = metrics["test"]
    *following, load = lines[at:]
    assert following == [
        f"test accuracy {test['accuracy']:.4f} · loss {test['loss']:.4f} · 40 images",
        f"trained in {metrics['train_seconds']:.1f} s · {metrics['images_per_second']:.0f} images/s",
        "run lightning_logs/small-1",
        "",
        "next:",
        "  tensorboard --logdir lightning_logs",
        "  cifar-lit report lightning_logs/small-1 --open",
        "  cifar-lit classify lightning_logs/small-1 PICTURES",
    ]
    assert shlex.split(load) == ["python", "-c", "import cifar_lit; print(cifar_lit.load('lightning_logs/small-1'))"]
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[:at] if line.startswith("│")]
    assert [row[:2] for row in table] == [[name, f"{accuracy:.4f}"] for name, accuracy in test["per_class"].items()]
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert not re.search(r"[\r\x1b]", answer.out)


def test_tensorboard_holds_curves_settings_and_images(run: Path) -> None:
    events = EventAccumulator(str(run))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == {*COLUMNS[2:]}
    figures, galleries = ("confusion_matrix", "accuracy_per_class"), ("confident_mistakes", "doubtful_hits")
    parts = {*(f"val/{name}" for name in figures), *(f"test/{name}" for name in (*figures, *galleries))}
    assert set(tags["images"]) == {"images/train", *parts}
    assert [event.step for event in events.Images("test/confusion_matrix")] == [10]
    (image,) = events.Images("images/train")
    assert image.width > 8 * 16
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10]
    assert b"test/accuracy" in events.SummaryMetadata("_hparams_/experiment").plugin_data.content
