"""What can be done with a run folder, and other ways to train."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from command_line import config_of, files_of, metrics_of, refused, typed

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.models.registry import build_net
from cifar_lit.runs.loggers import COLUMNS
from cifar_lit.training.checkpoint import read_checkpoint

OWN = Path("lightning_logs/small-1")  # the first run in a test's own folder
ONE_EPOCH = ("--recipe", "small.yaml", "--epochs", "1")


# ---- using it


def test_the_loaded_net_is_the_checkpoints(run: Path, data: ImageData) -> None:
    loaded = cifar_lit.load(run)
    assert loaded.classes == tuple(data.classes)
    assert not loaded.net.training
    images = data.test_images.images.permute(0, 3, 1, 2)
    net = build_net("lenet", channels=3, image_size=16, num_classes=4).eval()
    weights = read_checkpoint(run / "checkpoints/best.ckpt")["state_dict"]
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in weights.items() if name.startswith("net.")})
    mean, std = (torch.tensor(config_of(run)["data"][name]).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        logits = loaded(images)
        torch.testing.assert_close(logits, net((images.float() / 255 - mean) / std))
    assert (logits.argmax(1) == data.test_images.labels).sum().item() / 40 == metrics_of(run)["test"]["accuracy"]


def test_predictions_score_as_the_test_did(run: Path, data: ImageData) -> None:
    answer = typed("predict", "--ckpt_path", run / "checkpoints/best.ckpt")
    assert (answer.code, answer.err) == (0, "")
    assert f"40 predictions in {OWN}/predictions.csv" in answer.out
    with (OWN / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == list(range(40))
    assert [row["label"] for row in rows] == [data.classes[label] for label in data.test_images.labels.tolist()]
    assert sum(row["label"] == row["predicted"] for row in rows) / 40 == metrics_of(run)["test"]["accuracy"]
    assert all(0.25 <= float(row["probability"]) <= 1 for row in rows)  # the highest of four


# ---- other ways to train


def test_fit_tests_nothing_names_the_command_that_does_and_train_goes_on_with_the_test(run: Path) -> None:
    answer = typed("fit", "--recipe", "small.yaml")
    metrics, lines = metrics_of(OWN), answer.out.splitlines()
    assert metrics["test"] is None
    assert f"validation accuracy {metrics['val']['accuracy']:.4f} · loss {metrics['val']['loss']:.4f}" in lines
    assert "test/" not in (OWN / "metrics.csv").read_text().replace(",".join(COLUMNS), "")
    test = next(line.split() for line in lines if line.startswith("  cifar-lit test "))
    assert typed(*test[1:]).code == 0
    assert metrics_of(Path("lightning_logs/small-2"))["test"] == metrics_of(run)["test"]
    answer = typed("train", "--resume", OWN)
    assert answer.code == 0, answer.err
    assert metrics_of(OWN)["test"] == metrics_of(run)["test"]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_it_trains_in_other_precisions(precision: str) -> None:
    answer = typed(*ONE_EPOCH, "--precision", precision)
    assert (answer.code, answer.err) == (0, "")
    assert metrics_of(OWN)["precision"] == precision
    assert cifar_lit.load(OWN) is not None


def test_loggers_of_ones_own_write_beside_ours_and_none_writes_none() -> None:
    typed(*ONE_EPOCH, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "own")
    assert list(Path("own").rglob("metrics.csv"))
    assert (OWN / "metrics.csv").is_file()
    typed(*ONE_EPOCH, "--trainer.logger", "false")
    curves = {"events.out.tfevents.*", "metrics.csv"}
    assert set(files_of(OWN)) - set(files_of(Path("lightning_logs/small-2"))) == curves


# ---- test-time views


@pytest.mark.parametrize("views", ["mirror", "full"])
def test_a_checkpoint_is_tested_with_views_beside_its_plain_score(run: Path, views: str) -> None:
    answer = typed("test", "--ckpt_path", run / "checkpoints/best.ckpt", "--model.tta", views)
    assert answer.code == 0, answer.err
    assert "tta" not in metrics_of(run)["test"]
    test = metrics_of(OWN)["test"]
    scored = test.pop("tta")
    assert test == metrics_of(run)["test"]
    assert (list(scored), scored["views"]) == (["views", "accuracy", "loss"], views)
    assert scored["loss"] != test["loss"]
    lines = answer.out.splitlines()
    with_views = f"with {views} test-time views accuracy {scored['accuracy']:.4f} · loss {scored['loss']:.4f}"
    assert lines.index(with_views) < lines.index(f"test accuracy {test['accuracy']:.4f} · loss {test['loss']:.4f} · 40 images")


def test_a_training_with_views_keeps_them_out_of_its_validation(run: Path) -> None:
    answer = typed("--recipe", "small.yaml", "--model.tta", "mirror")
    assert answer.code == 0, answer.err
    metrics, plain = metrics_of(OWN), metrics_of(run)
    assert metrics["test"].pop("tta")["views"] == "mirror"
    assert (metrics["val"], metrics["test"]) == (plain["val"], plain["test"])
    line = "cifar-lit: model.tta must be one of none, mirror, full, not 'mirrored'. Did you mean mirror?"
    refused(typed("--recipe", "small.yaml", "--model.tta", "mirrored"), line, 2)
