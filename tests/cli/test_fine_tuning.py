"""Fine-tuning from the command line: start card, run folder, and settings refused before training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from contract.command_line import SMALL, assert_refused, config_of, files_of, metrics_of, rows_of, run_command

from cifar_lit.cli.run_report import new_class_lines
from cifar_lit.models.registry import build_net
from cifar_lit.training.checkpoint import read_checkpoint

ADAMW = ("--model.optimizer", "adamw", "--lr", "0.001")
SHAPENET = ("--net", "shapenet", "--weights", "weights.pth", *ADAMW)


@pytest.fixture(autouse=True)
def weights(working_folder: Path) -> None:
    torch.manual_seed(0)
    torch.save(build_net("shapenet", channels=3, image_size=16, num_classes=10).state_dict(), "weights.pth")


def test_the_start_card_lists_the_settings_of_a_feature_and_the_run_folder_is_complete() -> None:
    answer = run_command(*SMALL, *SHAPENET, "--finetune.frozen", "0.5", "--finetune.input_lr", "0.0001")
    assert answer.code == 0, answer.err
    card, fitted = " ".join(answer.out.split()).split("last layer fitted in ")
    assert "finetune.frozen 0.5 · finetune.input_lr 0.0001" in card
    assert " · validation accuracy 0." in fitted
    run = Path("lightning_logs/small-1")
    files = {
        "model.safetensors",
        "metrics.json",
        "predictions.csv",
        "report.html",
        "checkpoints/best.ckpt",
        "label_errors.csv",
    }
    assert files <= files_of(run)
    suspected = sum(row["suspected"] == "yes" for row in rows_of(run / "label_errors.csv"))
    assert re.search(rf" training and validation images: {suspected}\.", (run / "report.html").read_text())
    assert metrics_of(run)["train_seconds"] > 0


def test_training_only_the_last_layer_makes_a_complete_run() -> None:
    answer = run_command(*SMALL, *SHAPENET, "--finetune.unfreeze", "false")
    assert answer.code == 0, answer.err
    assert not any(text in answer.out for text in ("epoch 1/", "images/s"))
    run = Path("lightning_logs/small-1")
    assert read_checkpoint(run / "checkpoints/last.ckpt")["global_step"] == 0
    scored = run_command("test", "--ckpt_path", f"{run}/checkpoints/best.ckpt")
    accuracy = next(line for line in answer.lines if line.startswith("test accuracy 0."))
    assert accuracy in scored.lines


def test_the_weights_of_a_run_come_with_its_normalisation() -> None:
    assert run_command(*SMALL, *SHAPENET, "--finetune.unfreeze", "false", "--data.mean", "0.4").code == 0
    run = "lightning_logs/small-1"
    words = ("--net", "shapenet", "--weights", run, *ADAMW, "--finetune.unfreeze", "false")
    answer = run_command("fit", *SMALL, *words, "--data.num_classes", "4")
    assert answer.code == 0, answer.err
    data = config_of(Path("lightning_logs/small-2"))["data"]["images"]
    assert data["mean"] == [0.4] * 3 and data["std"] == config_of(Path(run))["data"]["images"]["std"]
    assert_refused(run_command(*SMALL, "--weights", "lightning_logs"), 2, "no weights lightning_logs/model.saf")


@pytest.mark.slow
def test_normalisation_is_that_of_the_pretraining_unless_set() -> None:
    pytest.importorskip("timm")
    net = build_net("timm/resnet10t", channels=3, image_size=32, num_classes=4)
    torch.save(net.state_dict(), "resnet.pth")
    words = (*SMALL, "--net", "timm/resnet10t", "--weights", "resnet.pth", "--finetune.unfreeze", "false")
    for flags, std in (((), [0.229, 0.224, 0.225]), (("--data.std", "0.5"), [0.5, 0.5, 0.5])):
        assert run_command("fit", *words, "--data.image_size", "32", *flags).code == 0
        data = config_of(max(Path("lightning_logs").glob("small-*")))["data"]["images"]
        assert data["mean"] == pytest.approx([0.485, 0.456, 0.406]) and data["std"] == pytest.approx(std)


def test_weights_of_another_net_are_refused_before_a_run_folder_is_made() -> None:
    answer = run_command(*SMALL, "--weights", "weights.pth", "--net", "lenet")
    assert_refused(answer, 2, "does not hold weights of lenet")
    assert not Path("lightning_logs").exists()


def test_new_classes_are_told_apart_from_those_of_the_run_that_gave_the_weights(tmp_path: Path) -> None:
    known = {"ant": 0.8, "bee": 1.0, "fly": None}
    (tmp_path / "metrics.json").write_text(json.dumps({"test": {"per_class": known}}))
    metrics = {"test": {"per_class": {"ant": 0.7, "bee": 0.6, "fly": 0.5, "rose": 0.9}}}
    changes = "ant 0.8 → 0.7, bee 1.0 → 0.6, fly None → 0.5; of new ones: rose 0.9"
    assert new_class_lines(metrics, str(tmp_path)) == [f"accuracy of the classes of {tmp_path}: {changes}"]
    assert new_class_lines(metrics, "imagenet") == new_class_lines({"test": {"per_class": known}}, str(tmp_path)) == []
