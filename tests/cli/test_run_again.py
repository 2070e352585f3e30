"""What can be done with a run folder, and other ways to train."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from command_line import config_of, files_of, metrics_of, typed

import cifar_lit
from cifar_lit.data.datamodule import ImageData
from cifar_lit.models.registry import build_net
from cifar_lit.runs.loggers import COLUMNS
from cifar_lit.training.checkpoint import read_checkpoint


def test_its_config_runs_it_again_to_the_last_bit(run: Path) -> None:
    assert typed("--config", run / "config.yaml").code == 0
    again, before = metrics_of(Path("lightning_logs/small-1")), metrics_of(run)
    for part in ("val", "test"):
        assert again[part] == before[part]
    weights = [
        read_checkpoint(folder / "checkpoints/last.ckpt")["state_dict"] for folder in (run, Path("lightning_logs/small-1"))
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_flags_beat_the_config_and_another_seed_gives_another_net(run: Path) -> None:
    typed("--seed", "4", "--config", run / "config.yaml", "--batch-size=40")
    again = Path("lightning_logs/small-1")
    assert (metrics_of(again)["seed"], metrics_of(again)["batch_size"]) == (4, 40)
    assert config_of(again)["data"]["count"] == 200
    assert metrics_of(again)["test"]["loss"] != metrics_of(run)["test"]["loss"]
    assert metrics_of(again)["test"]["images"] == metrics_of(run)["test"]["images"]


def test_run_numbers_count_up_for_each_recipe() -> None:
    Path("other.yaml").write_text(Path("small.yaml").read_text())
    for recipe in ("small", "small", "other", "small"):
        typed("--recipe", f"{recipe}.yaml", "--epochs", "1", default="fit")
    assert sorted(path.name for path in Path("lightning_logs").iterdir()) == ["other-1", "small-1", "small-2", "small-3"]


def test_logs_names_the_folder_of_run_folders() -> None:
    answer = typed("--recipe", "small.yaml", "--logs", "some/runs", "--epochs", "1")
    assert "run some/runs/small-1" in answer.out.splitlines()
    assert "  tensorboard --logdir some/runs" in answer.out.splitlines()
    assert not Path("lightning_logs").exists()
    Path("own.yaml").write_text("logs: mine\ntrainer: {max_epochs: 1}")
    assert "run mine/small-1" in typed("--recipe", "small.yaml", "--config", "own.yaml").out.splitlines()
    assert "run its/small-1" in typed("--logs", "its", "--recipe", "small.yaml", "--config", "own.yaml").out.splitlines()


def test_a_fast_dev_run_leaves_nothing_behind() -> None:
    before = {path.name for path in Path().iterdir()}
    answer = typed("--recipe", "small.yaml", "--trainer.fast_dev_run", "true")
    assert (answer.code, answer.err) == (0, "")
    assert {path.name for path in Path().iterdir()} == before


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
        expected = net((images.float() / 255 - mean) / std)
    torch.testing.assert_close(logits, expected)
    hits = (logits.argmax(1) == data.test_images.labels).sum().item()
    assert hits / 40 == metrics_of(run)["test"]["accuracy"]


@pytest.mark.parametrize(("command", "part", "other"), [("test", "test", "val"), ("validate", "val", "test")])
def test_an_evaluation_makes_a_folder_of_its_own_with_the_same_numbers(run: Path, command: str, part: str, other: str) -> None:
    answer = typed(command, "--ckpt_path", run / "checkpoints/best.ckpt")
    assert (answer.code, answer.err) == (0, "")
    own = Path("lightning_logs/small-1")
    outcomes = (
        ["events.out.tfevents.*", "metrics.json", "predictions.csv", "probabilities.npy"]
        if command == "test"
        else ["metrics.json"]
    )
    assert files_of(own) == ["config.yaml", *outcomes]
    metrics = metrics_of(own)
    assert metrics[part] == metrics_of(run)[part]
    assert metrics[other] is None
    assert metrics["train_seconds"] is None
    assert metrics["parameters"] == metrics_of(run)["parameters"]
    assert "run lightning_logs/small-1" in answer.out.splitlines()


def test_a_checkpoint_overrides_no_flag(run: Path) -> None:
    words = [
        "--ckpt_path",
        run / "checkpoints/best.ckpt",
        "--batch-size",
        "7",
        "--lr",
        "0.125",
        "--data.eval_batch_size=9",
        "--seed=8",
    ]
    assert typed("test", *words).code == 0
    config, metrics = config_of(Path("lightning_logs/small-1")), metrics_of(Path("lightning_logs/small-1"))
    assert (config["data"]["batch_size"], config["model"]["lr"], config["data"]["eval_batch_size"]) == (7, 0.125, 9)
    assert (metrics["batch_size"], metrics["seed"]) == (7, 8)
    assert metrics["test"]["accuracy"] == metrics_of(run)["test"]["accuracy"]  # of the same images in other batches
    assert metrics["test"]["loss"] == pytest.approx(metrics_of(run)["test"]["loss"], abs=1e-5)


def test_predictions_score_as_the_test_did(run: Path, data: ImageData) -> None:
    answer = typed("predict", "--ckpt_path", run / "checkpoints/best.ckpt")
    assert (answer.code, answer.err) == (0, "")
    assert "40 predictions in lightning_logs/small-1/predictions.csv" in answer.out
    with Path("lightning_logs/small-1/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == list(range(40))
    assert [row["label"] for row in rows] == [data.classes[label] for label in data.test_images.labels.tolist()]
    assert sum(row["label"] == row["predicted"] for row in rows) / 40 == metrics_of(run)["test"]["accuracy"]
    assert all(0.25 <= float(row["probability"]) <= 1 for row in rows)  # the highest of four


# ---- other ways to train


def test_fit_tests_nothing_and_names_the_command_that_does() -> None:
    answer = typed("fit", "--recipe", "small.yaml")
    run = Path("lightning_logs/small-1")
    metrics = metrics_of(run)
    assert metrics["test"] is None
    assert f"validation accuracy {metrics['val']['accuracy']:.4f} · loss {metrics['val']['loss']:.4f}" in answer.out.splitlines()
    assert "test/" not in (run / "metrics.csv").read_text().replace(",".join(COLUMNS), "")
    command = next(line.split() for line in answer.out.splitlines() if line.startswith("  cifar-lit test "))
    tested = typed(*command[1:])
    assert tested.code == 0, tested.err
    assert metrics_of(Path("lightning_logs/small-2"))["test"]["images"] == 40


def test_train_resumes_a_fit_with_the_test_it_left_out(run: Path) -> None:
    typed("fit", "--recipe", "small.yaml")
    answer = typed("--resume", default="train")
    assert answer.code == 0, answer.err
    assert [path.name for path in Path("lightning_logs").iterdir()] == ["small-1"]
    assert metrics_of(Path("lightning_logs/small-1"))["test"] == metrics_of(run)["test"]


def test_without_validation_images_the_last_checkpoint_is_tested() -> None:
    answer = typed("--recipe", "small.yaml", "--data.val_size", "0")
    assert (answer.code, answer.err) == (0, "")
    run = Path("lightning_logs/small-1")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["last.ckpt"]
    assert metrics_of(run)["val"] is None
    assert " val loss" not in answer.out
    typed("test", "--ckpt_path", run / "checkpoints/last.ckpt")
    assert metrics_of(Path("lightning_logs/small-2"))["test"] == metrics_of(run)["test"]
    refused = typed("validate", "--ckpt_path", run / "checkpoints/last.ckpt")
    assert refused.complaints == ["cifar-lit: there is nothing to validate on: data.val_size is 0"]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_it_trains_in_other_precisions(precision: str) -> None:
    answer = typed("--recipe", "small.yaml", "--precision", precision, "--epochs", "1")
    assert (answer.code, answer.err) == (0, "")
    assert metrics_of(Path("lightning_logs/small-1"))["precision"] == precision
    assert cifar_lit.load("lightning_logs/small-1") is not None


def test_loggers_of_ones_own_write_beside_ours() -> None:
    typed("--recipe", "small.yaml", "--epochs", "1", "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "own")
    assert list(Path("own").rglob("metrics.csv"))
    assert (Path("lightning_logs/small-1/metrics.csv")).is_file()
    typed("--recipe", "small.yaml", "--epochs", "1", "--trainer.logger", "false")
    assert files_of(Path("lightning_logs/small-2")) == [
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "config.yaml",
        "metrics.json",
        "model.safetensors",
        "predictions.csv",
        "probabilities.npy",
        "report.html",
    ]
