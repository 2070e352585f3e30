"""`--auto-batch` and `--auto-lr`, and what is said when memory runs out."""

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


@pytest.fixture(scope="module")
def images(data: ImageData) -> tuple[Tensor, Tensor]:
    """Training images, normalised, and their labels."""
    return data.plain_images(160), data.train_images.labels[spread_rows(data.split[0], 160)]


def trial(data: ImageData, lr: float = 0.05, optimizer: str = "sgd", net: str = "shapenet", **settings: float) -> Trial:
    return Trial(
        ImageClassifier(net, [3, 16, 16], 4, optimizer=optimizer, lr=lr, width=0.5, **settings), data, CPU, "32-true"
    )


def test_a_search_does_not_change_the_weights_that_training_starts_from(data: ImageData) -> None:
    model, own = ImageClassifier("shapenet", [3, 16, 16], 4, lr=0.05, width=0.5), copy(data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    search({"batch", "lr"}, model, own, CPU, "32-true")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_search_for_the_rate_changes_all_rates_alike_and_holds_norms(
    data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Trial] = []

    def found(some: Trial, images: Tensor, labels: Tensor, batch: int, lr: float) -> float:
        tried.append(some)
        return 0.5 * lr

    monkeypatch.setattr(tuner, "learning_rate", found)
    settings: dict[str, Any] = {"optimizer": "adamw", "lr": 0.02, "input_lr": 0.004, "fixed_norms": True}
    model = ImageClassifier("shapenet", [3, 16, 16], 4, **settings)
    search({"lr"}, model, copy(data), CPU, "32-true")
    assert [model.hparams[name] for name in RATES] == [0.01, None, None, 0.002]
    norms = [module for module in tried[0].net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and not any(norm.training for norm in norms) and tried[0].net.training


def test_a_search_looks_at_images_of_all_classes_where_they_lie_class_by_class(
    data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = copy(data), list[int]()
    own.parts.split = data.train_images.labels.argsort(), own.split[1]
    monkeypatch.setattr(tuner, "learning_rate", lambda some, images, labels, *_: seen.extend(labels.tolist()) or 0.1)
    monkeypatch.setattr(tuner, "MAX_FLOATS", 1)
    monkeypatch.setattr(tuner, "PROBE_IMAGES", 40)
    for name in ("MIN_STEPS", "MAX_IMAGES"):
        monkeypatch.setattr(tuner, name, 1)
    own.batch_size = 40
    search({"lr"}, ImageClassifier("shapenet", [3, 16, 16], 4), own, CPU, "32-true")
    assert 0 < len(seen) < len(own.split[0]) and set(seen) == set(range(4))


def test_on_a_cpu_the_largest_batch_follows_from_the_memory_that_is_free(
    data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, sizes = trial(data), []
    for free in (2 * 10**7, 4 * 10**7, 10**12):
        monkeypatch.setattr(tuner, "free_memory", lambda device, free=free: free)
        sizes.append(largest_batch(some, [3, 16, 16], 10**6))
    assert 16 <= sizes[0] == sizes[1] // 2
    assert sizes[2] == 4096
    assert [largest_batch(some, [3, 16, 16], limit) for limit in (3, 63, 64)] == [16, 32, 64]
    monkeypatch.setattr(tuner, "free_memory", lambda device: 10**4)
    with pytest.raises(Failure, match="16 images do not fit into cpu memory: choose a smaller --net"):
        largest_batch(some, [3, 16, 16], 10**6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_the_rate_lowers_the_loss_whatever_was_set(
    data: ImageData, images: tuple[Tensor, Tensor], optimizer: str
) -> None:
    rates = []
    for lr in (0.02, 0.06):
        torch.manual_seed(0)
        rates.append(learning_rate(trial(data, lr, optimizer), *images, 32, lr))
    assert max(rates) / min(rates) < 4
    some = trial(data, rates[0], optimizer)
    before = some.loss(*images).item()
    for _ in range(30):
        some.step(*images)
    assert some.loss(*images).item() < 0.95 * before


def test_groups_keep_the_ratio_of_their_rates(data: ImageData, images: tuple[Tensor, Tensor]) -> None:
    some = trial(data, 0.02, "muon", head_lr=2.0)
    before = [group["lr"] for group in some.optimizer.param_groups]
    learning_rate(some, *images, 32, 0.02)
    factors = {round(group["lr"] / rate, 6) for group, rate in zip(some.optimizer.param_groups, before, strict=True)}
    assert (len(set(before)) > 1, len(factors)) == (True, 1)


def test_where_no_rate_lowers_the_loss_it_is_said(data: ImageData, images: tuple[Tensor, Tensor]) -> None:
    line = r"no learning rate in 1e\+27 … 1e\+32 lowers the loss clearly in 60 steps: set --lr"
    with pytest.raises(Failure, match=line):
        learning_rate(trial(data, 1e30, net="lenet"), *images, 32, 1e30)


def test_the_rate_is_where_the_loss_falls_fastest_before_its_lowest() -> None:
    falling = [2.0] * 10 + [1.9, 1.7, 1.4, 1.1, 0.9, 0.8, 0.79] + [0.8, 3.0, 2.0, 1.0]
    assert steepest(falling, 1) in (12, 13)
    assert steepest(falling, 3) in (11, 12, 13)
    assert steepest([2.0, 1.99, 1.98, 1.97, 2.5, 3.0], 1) is None  # by chance
    assert steepest([], 1) is None


def test_a_search_looks_on_the_one_device_that_is_used() -> None:
    two = Machine("a processor", 2, False, (("a GPU", 10**9),) * 2)
    assert [str(device_of(two, *used, 1)) for used in (("cpu", 1), ("gpu", [1]))] == ["cpu", "cuda:1"]
    for accelerator, devices, nodes in (("auto", "auto", 1), ("cpu", 2, 1), ("auto", 1, 2)):
        with pytest.raises(UsageError, match="search with --devices 1"):
            device_of(two, accelerator, devices, nodes)
