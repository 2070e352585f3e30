"""Fine-tuning from the command line: what it says before, what it leaves, and what is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract.command_line import SMALL, assert_refused, config_of, files_of, metrics_of, run_command
from contract.conftest import fork_pair

from cifar_lit.models.registry import build_net
from cifar_lit.training.checkpoint import read_checkpoint

ADAMW = ("--model.optimizer", "adamw", "--model.momentum", "0", "--lr", "0.001")
SHAPENET = ("--net", "shapenet", "--model.weights", "weights.pth", *ADAMW)


@pytest.fixture(autouse=True)
def weights(working_folder: Path) -> None:
    torch.manual_seed(0)
    torch.save(build_net("shapenet", channels=3, image_size=16, num_classes=10).state_dict(), "weights.pth")


def test_the_card_says_what_will_be_trained_and_the_run_is_as_whole_as_any() -> None:
    answer = run_command(*SMALL, *SHAPENET, "--model.frozen", "0.5", "--model.input_lr", "0.0001")
    assert answer.code == 0, answer.err
    plan = next(line for line in answer.lines if line.startswith("trains "))
    assert "last layer on features of the frozen net, about 1 s" in plan
    assert "then the later layers, rates from 0.0001 at the input to 0.001, about 1 s" in plan
    assert any(
        line.startswith("last layer fitted in ") and " · validation accuracy 0." in line for line in answer.lines
    )
    run = Path("lightning_logs/small-1")
    assert {"model.safetensors", "metrics.json", "predictions.csv", "report.html", "checkpoints/best.ckpt"} <= files_of(
        run
    )
    assert metrics_of(run)["train_seconds"] > 0


def test_the_last_layer_alone_makes_a_run_too() -> None:
    answer = run_command(*SMALL, *SHAPENET, "--model.unfreeze", "false")
    assert answer.code == 0, answer.err
    assert "L-BFGS on the features of 2 views of each training image · seed 3" in answer.out
    assert not any(text in answer.out for text in ("adamw", "lr 0.001", "epoch 1/", "images/s"))
    run = Path("lightning_logs/small-1")
    assert read_checkpoint(run / "checkpoints/last.ckpt")["global_step"] == 0
    scored = run_command("test", "--ckpt_path", f"{run}/checkpoints/best.ckpt")
    accuracy = next(line for line in answer.lines if line.startswith("test accuracy 0."))
    assert accuracy in scored.lines


def test_two_processes_compute_the_features_together_and_train_as_one() -> None:
    words = (*SMALL, *SHAPENET, "--model.fixed_norms", "true", "--epochs", "1", "--data.cache_dir")
    answers = [run_command(*words, "cache-1"), *(rank.answer() for rank in fork_pair([*words, "cache-2"], Path.cwd()))]
    assert [answer.code for answer in answers] == [0, 0, 0], answers[1].err
    fitted = [
        next(line.partition(" · ")[2] for line in each.lines if line.startswith("last layer")) for each in answers[:2]
    ]
    scores = [metrics_of(Path(f"lightning_logs/small-{number}"))["test"]["loss"] for number in (1, 2)]
    assert fitted[0] == fitted[1] and scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_images_are_prepared_as_in_the_pretraining_unless_settings_say_otherwise() -> None:
    pytest.importorskip("timm")
    net = build_net("timm/resnet10t", channels=3, image_size=32, num_classes=4)
    torch.save(net.state_dict(), "resnet.pth")
    net_flags = ("--net", "timm/resnet10t", "--model.weights", "resnet.pth")
    timm = (*SMALL, *net_flags, "--data.image_size", "32", "--model.unfreeze", "false")
    for own, std in (((), [0.229, 0.224, 0.225]), (("--data.std", "0.5"), [0.5, 0.5, 0.5])):
        assert run_command("fit", *timm, *own).code == 0
        data = config_of(max(Path("lightning_logs").glob("small-*")))["data"]
        assert data["mean"] == pytest.approx([0.485, 0.456, 0.406]) and data["std"] == pytest.approx(std)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--model.weights", "weights.pth", "--net", "lenet"), "does not hold weights of lenet"),
        (("--model.frozen", "0.5"), "model.frozen needs pretrained layers: set model.weights"),
        (("--model.weights", "weights.pth", "--net", "shapenet", "--model.frozen", "1"), "model.frozen is a share"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line_before_there_is_a_run(words: tuple[str, ...], line: str) -> None:
    answer = run_command(*SMALL, *words)
    assert_refused(answer, 2, line)
    assert not Path("lightning_logs").exists()
