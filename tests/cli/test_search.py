"""`--auto-batch` and `--auto-lr`, and what is said when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import config_of, metrics_of, refused, typed

from cifar_lit.cli import tuner as search
from cifar_lit.cli.tuner import Trial, device_of, largest_batch, learning_rate, steepest
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine
from cifar_lit.training.classifier import ImageClassifier

CPU = torch.device("cpu")
S = ("--recipe", "small.yaml", "--epochs", "1")


@pytest.fixture
def model() -> ImageClassifier:
    return ImageClassifier("shapenet", [3, 16, 16], 4, lr=0.05)


def test_what_is_found_is_used_and_recorded_as_if_it_had_been_typed(here: Path) -> None:
    answer = typed(*S, "--net", "shapenet", "--auto-batch", "--auto-lr", "--data.count", "800")
    assert answer.code == 0, answer.err
    config, metrics = config_of(here / "lightning_logs/small-1"), metrics_of(here / "lightning_logs/small-1")
    assert config["data"]["batch_size"] == metrics["batch_size"] == 32  # 760 images make 20 steps of 32 and no 20 of 64
    found = config["model"]["lr"]
    assert found != 0.05
    assert f"--auto-lr: {found:g} (0.05 was set)" in answer.out
    assert f"lr {found:g}" in answer.out  # on the start card
    assert typed("--config", "lightning_logs/small-1/config.yaml").code == 0


def test_a_search_does_not_change_the_weights_that_training_starts_from(data: ImageData, model: ImageClassifier) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    search.search({"batch", "lr"}, model, data, CPU, "32-true")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("free", "size"), [(10**12, 4096), (10**8, None), (10**4, 0)])
def test_on_a_cpu_the_largest_batch_follows_from_the_memory_that_is_free(
    data: ImageData, model: ImageClassifier, monkeypatch: pytest.MonkeyPatch, free: int, size: int | None
) -> None:
    monkeypatch.setattr(search, "available_memory", lambda: free)
    trial = Trial(model, data, CPU, "32-true")
    if size == 0:
        with pytest.raises(Failure, match="not even 16 images fit"):
            largest_batch(trial, [3, 16, 16], 10**6)
        return
    found = largest_batch(trial, [3, 16, 16], 10**6)
    assert found == (size or found) and found & (found - 1) == 0 and found <= 4096


def test_twice_the_memory_takes_twice_the_batch(data: ImageData, model: ImageClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, sizes = Trial(model, data, CPU, "32-true"), []
    for free in (20_000_000, 40_000_000):
        monkeypatch.setattr(search, "available_memory", lambda free=free: free)
        sizes.append(largest_batch(trial, [3, 16, 16], 10**6))
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_the_rate_that_is_found_lowers_the_loss_whatever_was_set(data: ImageData, optimizer: str) -> None:
    images, labels = data.plain_images(160), data.train_images.labels[data.split[0][:160]]
    found = []
    for lr in (0.02, 0.06):
        torch.manual_seed(0)
        trial = Trial(ImageClassifier("shapenet", [3, 16, 16], 4, optimizer=optimizer, lr=lr), data, CPU, "32-true")
        found.append(learning_rate(trial, images, labels, 32, lr))
    assert max(found) / min(found) < 4
    torch.manual_seed(0)
    trial = Trial(ImageClassifier("shapenet", [3, 16, 16], 4, optimizer=optimizer, lr=found[0]), data, CPU, "32-true")
    before = float(trial.loss(images, labels))
    for _ in range(30):
        trial.step(images, labels)
    assert float(trial.loss(images, labels)) < 0.95 * before


def test_where_no_rate_lowers_the_loss_it_is_said(data: ImageData, model: ImageClassifier) -> None:
    with pytest.raises(
        Failure, match="no learning rate from 1e\\+27 to 1e\\+32 lowers the loss clearly in 60 steps: choose --lr by hand"
    ):
        images, labels = data.plain_images(64), data.train_images.labels[data.split[0][:64]]
        huge = ImageClassifier("lenet", [3, 16, 16], 4, lr=1e30)
        learning_rate(Trial(huge, data, CPU, "32-true"), images, labels, 32, 1e30)


def test_the_rate_is_where_the_loss_falls_fastest_before_its_lowest() -> None:
    falling = [2.0] * 10 + [1.9, 1.7, 1.4, 1.1, 0.9, 0.8, 0.79] + [0.8, 3.0, 2.0, 1.0]
    assert steepest(falling, 1) in (12, 13)
    assert steepest(falling, 3) in (11, 12, 13)
    assert steepest([2.0, 1.99, 1.98, 1.97, 2.5, 3.0], 1) is None  # by chance
    assert steepest([], 1) is None


def test_a_small_batchs_chance_does_not_hide_the_fall(data: ImageData) -> None:
    images, labels = data.plain_images(160), data.train_images.labels[data.split[0][:160]]
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        trial = Trial(ImageClassifier("shapenet", [3, 16, 16], 4, optimizer="adamw", lr=0.005), data, CPU, "32-true")
        found.append(learning_rate(trial, images, labels, 4, 0.005))
    assert max(found) / min(found) < 10
    assert min(found) > 1e-4 and max(found) < 0.5


@pytest.mark.parametrize(
    ("gpus", "accelerator", "devices", "expected"),
    [
        (0, "auto", "auto", "cpu"),
        (1, "auto", "auto", "cuda"),
        (2, "cpu", 1, "cpu"),
        (2, "gpu", [1], "cuda:1"),
        (2, "auto", "auto", None),
        (0, "cpu", 2, None),
    ],
)
def test_the_search_looks_on_the_one_device_that_is_used(gpus: int, accelerator: str, devices: Any, expected: str | None) -> None:
    machine = Machine("a processor", 2, False, (("a GPU", 10**9),) * gpus)
    if expected is None:
        with pytest.raises(UsageError, match="find the values with --devices 1"):
            device_of(machine, accelerator, devices)
    else:
        assert str(device_of(machine, accelerator, devices)) == expected


def test_a_search_is_for_new_trainings(run: Path) -> None:
    line = "cifar-lit: --auto-lr is for new trainings: leave it out"
    refused(typed("test", "--ckpt_path", run / "checkpoints/best.ckpt", "--auto-lr"), line, 2)


def test_want_of_memory_names_the_batch_sizes_and_what_to_try(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, batch: Any, last: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("cifar_lit.training.step.TrainingStep.run", full)
    answer = typed(*S)
    assert answer.complaints == [
        "cifar-lit: out of memory with batches of 32 images in training and 500 in evaluation: halve --batch-size, let "
        "--auto-batch find the largest, lower --data.eval_batch_size, or choose a smaller --net"
    ]
    assert answer.code == 1
