"""`--auto-batch` and `--auto-lr`."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cifar_lit.cli import tuner
from cifar_lit.cli.tuner import RATES, Trial, device_of, largest_batch, learning_rate, search, steepest
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import spread_rows
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import Machine
from cifar_lit.training.classifier import ImageClassifier

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def images(data: ImageData) -> Batch:
    """Return normalised training images and their labels."""
    return data.plain_images(160), data.train_images.labels[spread_rows(data.split[0], 160)]


def make_trial(data: ImageData, lr: float, optimizer: str = "sgd", net: str = "shapenet", **settings: float) -> Trial:
    model = ImageClassifier(net, [3, 16, 16], 4, optimizer=optimizer, lr=lr, width=0.5, **settings)
    return Trial(model, data, CPU, "32-true")


def test_a_search_does_not_change_the_initial_weights(data: ImageData) -> None:
    model, own = ImageClassifier("shapenet", [3, 16, 16], 4, lr=0.05, width=0.5), copy(data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    search({"batch", "lr"}, model, own, CPU, "32-true")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_auto_lr_scales_all_rates_and_keeps_fixed_norms(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Trial] = []

    def half_the_rate(trial: Trial, images: Tensor, labels: Tensor, batch: int, lr: float) -> float:
        trials.append(trial)
        return 0.5 * lr

    monkeypatch.setattr(tuner, "learning_rate", half_the_rate)
    settings: dict[str, Any] = {"optimizer": "adamw", "lr": 0.02, "input_lr": 0.004, "fixed_norms": True}
    model = ImageClassifier("shapenet", [3, 16, 16], 4, **settings)
    search({"lr"}, model, copy(data), CPU, "32-true")
    assert [model.hparams[name] for name in RATES] == [0.01, None, None, 0.002]
    norms = [module for module in trials[0].net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and not any(norm.training for norm in norms) and trials[0].net.training


def test_small_gradients_of_a_trial_in_float16_are_not_lost(data: ImageData, images: Batch) -> None:
    trial = Trial(ImageClassifier("shapenet", [3, 16, 16], 4, width=0.5), data, CPU, "16-mixed")
    loss = trial.loss
    trial.loss = lambda *batch: loss(*batch) * 1e-7  # type: ignore[method-assign]
    trial.step(images[0][:8], images[1][:8])
    sizes = [float(each.grad.abs().max()) for each in trial.net.parameters() if each.grad is not None]
    assert 0 < min(sizes) <= max(sizes) < 1e-6


def test_a_search_samples_all_classes_of_sorted_images(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = copy(data), list[int]()
    own.parts.split = data.train_images.labels.argsort(), own.split[1]
    monkeypatch.setattr(tuner, "learning_rate", lambda trial, images, labels, *_: seen.extend(labels.tolist()) or 0.1)
    monkeypatch.setattr(tuner, "MAX_FLOATS", 1)
    monkeypatch.setattr(tuner, "PROBE_IMAGES", 40)
    for name in ("MIN_STEPS", "MAX_IMAGES"):
        monkeypatch.setattr(tuner, name, 1)
    own.batch_size = 40
    search({"lr"}, ImageClassifier("shapenet", [3, 16, 16], 4), own, CPU, "32-true")
    assert 0 < len(seen) < len(own.split[0]) and set(seen) == set(range(4))


def test_on_a_cpu_the_largest_batch_depends_on_free_memory(data: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    trial = make_trial(data, 0.05)
    for free in (2 * 10**7, 4 * 10**7, 10**12):
        monkeypatch.setattr(tuner, "free_memory", lambda device, free=free: free)
        sizes.append(largest_batch(trial, [3, 16, 16], 10**6))
    assert 16 <= sizes[0] == sizes[1] // 2
    assert sizes[2] == 4096
    assert [largest_batch(trial, [3, 16, 16], limit) for limit in (3, 63, 64)] == [16, 32, 64]
    monkeypatch.setattr(tuner, "free_memory", lambda device: 10**4)
    with pytest.raises(Failure, match="16 images do not fit into cpu memory: choose a smaller --net"):
        largest_batch(trial, [3, 16, 16], 10**6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_auto_lr_lowers_the_loss_from_any_configured_rate(data: ImageData, images: Batch, optimizer: str) -> None:
    rates = []
    for lr in (0.02, 0.06):
        torch.manual_seed(0)
        rates.append(learning_rate(make_trial(data, lr, optimizer), *images, 32, lr))
    assert max(rates) / min(rates) < 4
    trial = make_trial(data, rates[0], optimizer)
    before = trial.loss(*images).item()
    for _ in range(30):
        trial.step(*images)
    assert trial.loss(*images).item() < 0.95 * before


def test_parameter_groups_keep_the_ratio_of_their_rates(data: ImageData, images: Batch) -> None:
    trial = make_trial(data, 0.02, "muon", head_lr=2.0)
    before = [group["lr"] for group in trial.optimizer.param_groups]
    learning_rate(trial, *images, 32, 0.02)
    after = [group["lr"] for group in trial.optimizer.param_groups]
    factors = {round(new / old, 6) for new, old in zip(after, before, strict=True)}
    assert (len(set(before)) > 1, len(factors)) == (True, 1)


def test_it_is_an_error_if_no_rate_lowers_the_loss(data: ImageData, images: Batch) -> None:
    line = r"no learning rate in 1e\+27 … 1e\+32 lowers the loss clearly in 60 steps: set --lr"
    with pytest.raises(Failure, match=line):
        learning_rate(make_trial(data, 1e30, net="lenet"), *images, 32, 1e30)


def test_auto_lr_chooses_the_steepest_descent_before_the_lowest_loss() -> None:
    falling = [2.0] * 10 + [1.9, 1.7, 1.4, 1.1, 0.9, 0.8, 0.79] + [0.8, 3.0, 2.0, 1.0]
    assert steepest(falling, 1) in (12, 13)
    assert steepest(falling, 3) in (11, 12, 13)
    assert steepest([2.0, 1.99, 1.98, 1.97, 2.5, 3.0], 1) is None  # a random decrease
    assert steepest([], 1) is None


def test_a_search_runs_on_the_single_device_in_use() -> None:
    two = Machine("a processor", 2, False, (("a GPU", 10**9),) * 2)
    assert [str(device_of(two, *used, 1)) for used in (("cpu", 1), ("gpu", [1]))] == ["cpu", "cuda:1"]
    for accelerator, devices, nodes in (("auto", "auto", 1), ("cpu", 2, 1), ("auto", 1, 2)):
        with pytest.raises(UsageError, match="search with --devices 1"):
            device_of(two, accelerator, devices, nodes)
