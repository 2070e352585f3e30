from pathlib import Path

import pytest
import torch
from real_runs import here, metrics, only_run

import cifar_lit
from cifar_lit.training.checkpoint import read_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

# The quickstart's images, net and schedule, for fewer epochs.
SHAPES = [
    *("--recipe", "resnet18"),  # not the default, which whitens and changes sizes
    *("--dataset", "shapes", "--data.count", "8000", "--data.val_size", "500", "--batch-size", "128", "--net", "shapenet"),
    *("--lr", "0.1", "--model.momentum", "0.9", "--model.schedule", "one_cycle", "--data.crop", "2", "--devices", "1"),
]


@pytest.mark.parametrize(("precision", "difference"), [("32-true", 0.005), ("bf16-mixed", 0.01), ("16-mixed", 0.005)])
def test_a_training_on_the_gpu_learns_and_scores_alike_on_the_cpu(tmp_path: Path, precision: str, difference: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = here(["train", *SHAPES, "--epochs", "4", "--precision", precision, "--accelerator", "gpu"], tmp_path / "gpu")
    assert done.code == 0, done.err
    assert "devices      1 × cuda" in done.out
    found = metrics(tmp_path / "gpu")
    assert (found["accelerator"], found["devices"], found["precision"]) == ("gpu", 1, precision)
    assert found["test"]["images"] == 1600
    assert found["test"]["accuracy"] > 0.3  # chance is 0.1
    assert torch.cuda.max_memory_allocated() - before < 1 << 30  # a batch of 128 small images needs far less

    checkpoint = str(only_run(tmp_path / "gpu") / "checkpoints" / "best.ckpt")
    words = ["test", "--ckpt_path", checkpoint, "--accelerator", "cpu", "--precision", "32-true", "--devices", "1"]
    assert here(words, tmp_path / "cpu").code == 0
    assert metrics(tmp_path / "cpu")["test"]["accuracy"] == pytest.approx(found["test"]["accuracy"], abs=difference)


def test_weights_from_the_gpu_are_loaded_where_there_is_none(tmp_path: Path) -> None:
    assert here(["train", *SHAPES, "--epochs", "1", "--accelerator", "gpu"], tmp_path).code == 0
    checkpoint = read_checkpoint(only_run(tmp_path) / "checkpoints" / "last.ckpt")
    assert {tensor.device.type for tensor in checkpoint["state_dict"].values()} == {"cpu"}
    net = cifar_lit.load(only_run(tmp_path))
    assert {parameter.device.type for parameter in net.net.parameters()} == {"cpu"}
    assert net(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 10)


def test_a_stopped_training_on_the_gpu_goes_on_from_its_step(tmp_path: Path) -> None:
    words = ["train", *SHAPES, "--epochs", "2", "--accelerator", "gpu", "--trainer.callbacks=at_step.AtStep"]
    assert here(words, tmp_path, AT_STEP="80", AT_STEP_SIGNAL="2").code == 130
    resumed = here(["train", "--resume"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert "at epoch 2, step 81" in resumed.out
    assert metrics(tmp_path)["accelerator"] == "gpu"
