import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.optimizers import OPTIMIZERS, build_optimizer, override_optimizer_settings, parameter_groups


def net() -> nn.Module:
    torch.manual_seed(0)
    return build_net("shapenet", channels=3, image_size=16, num_classes=5).double()


def stepped(model: nn.Module, optimizer: Optimizer, steps: int = 4) -> dict[str, torch.Tensor]:
    """The parameters after some steps on the same random batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 5, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return dict(model.named_parameters())


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}])
def test_sgd_without_decay_is_torchs(settings: dict[str, Any]) -> None:
    ours, theirs = net(), net()
    assert_equal(
        stepped(ours, build_optimizer(ours, "sgd", 0.1, **settings)),
        stepped(theirs, SGD(theirs.parameters(), lr=0.1, **settings)),
    )


def test_adamw_without_decay_is_torchs() -> None:
    ours, theirs = net(), net()
    assert_equal(
        stepped(ours, build_optimizer(ours, "adamw", 0.01)),
        stepped(theirs, AdamW(theirs.parameters(), lr=0.01, weight_decay=0)),
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_decay_pulls_on_weights_and_leaves_biases_and_norms_alone(name: str) -> None:
    model = net()
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, name, 0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])}
    assert shrunk == {key for key, parameter in before.items() if parameter.ndim > 1}
    for key in shrunk:
        torch.testing.assert_close(dict(model.named_parameters())[key], before[key] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_trainable_parameter_is_in_exactly_one_group(name: str) -> None:
    model = net()
    frozen = next(model.parameters())
    frozen.requires_grad = False
    grouped = [id(parameter) for group in parameter_groups(model, name, 0.1) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters() if parameter is not frozen)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_net_of_one_kind_of_parameter_has_one_group(name: str) -> None:
    assert len(parameter_groups(nn.Linear(3, 2, bias=False), name, 0.1)) == 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"optimizer": "adam"}, "Did you mean adamw"),
        ({"lr": -1.0}, "above 0, not -1: set --lr"),
        ({"lr": float("nan")}, "above 0, not nan"),
        ({"optimizer": "muon", "momentum": 1.0}, "momentum must be 0 or more and below 1, not 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ImageClassifier("lenet", **settings)


def saved(name: str, **settings: Any) -> tuple[dict[str, Any], nn.Module]:
    """A checkpoint of a net after some steps with this optimizer, at a tenth of its rate; and the net."""
    model = net()
    optimizer = build_optimizer(model, name, **settings)
    stepped(model, optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
        group["lr"] *= 0.1
    schedule = {"base_lrs": [settings["lr"]] * 2, "_last_lr": [0.1 * settings["lr"]] * 2, "last_epoch": 4}
    known = {"optimizer": name, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, **settings}
    return {"hyper_parameters": known, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [schedule]}, model


def overridden(checkpoint: dict[str, Any], model: nn.Module, **settings: Any) -> dict[str, Any]:
    result = copy.deepcopy(checkpoint)
    override_optimizer_settings(result, {**checkpoint["hyper_parameters"], **settings}, model)
    return result


def test_the_same_settings_leave_a_checkpoint_as_it_is() -> None:
    checkpoint, model = saved("sgd", lr=0.2, momentum=0.9, weight_decay=1e-3)
    result = overridden(checkpoint, model)
    assert result["lr_schedulers"] == checkpoint["lr_schedulers"]
    assert result["optimizer_states"][0]["param_groups"] == checkpoint["optimizer_states"][0]["param_groups"]


def test_a_new_rate_scales_the_one_that_the_schedule_had_come_to() -> None:
    checkpoint, model = saved("sgd", lr=0.2, momentum=0.9)
    result = overridden(checkpoint, model, lr=0.6)
    for group in result["optimizer_states"][0]["param_groups"]:
        assert (group["initial_lr"], group["lr"]) == pytest.approx((0.6, 0.06))
    assert result["lr_schedulers"][0] == {
        "base_lrs": pytest.approx([0.6, 0.6]),
        "_last_lr": pytest.approx([0.06, 0.06]),
        "last_epoch": 4,
    }
    assert result["optimizer_states"][0]["state"].keys() == checkpoint["optimizer_states"][0]["state"].keys()


@pytest.mark.parametrize("before", [0.0, 1e-3])
@pytest.mark.parametrize("after", [0.0, 5e-4])
def test_a_new_decay_is_that_of_the_weights_alone(before: float, after: float) -> None:
    checkpoint, model = saved("sgd", lr=0.2, weight_decay=before)
    groups = overridden(checkpoint, model, weight_decay=after)["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [after, 0.0]


def test_new_momentum_counts() -> None:
    checkpoint, model = saved("sgd", lr=0.2, momentum=0.9)
    groups = overridden(checkpoint, model, momentum=0.5, nesterov=True)["optimizer_states"][0]["param_groups"]
    assert [(group["momentum"], group["nesterov"]) for group in groups] == [(0.5, True)] * 2


def test_another_optimizer_cannot_take_over_the_state_of_the_first() -> None:
    checkpoint, model = saved("sgd", lr=0.2)
    with pytest.raises(UsageError, match="was trained with sgd"):
        overridden(checkpoint, model, optimizer="adamw")


def test_a_checkpoint_without_our_settings_is_left_alone() -> None:
    checkpoint = {"optimizer_states": [{"param_groups": [{"lr": 3.0}]}]}
    override_optimizer_settings(checkpoint, {"lr": 0.1, "optimizer": "sgd"}, net())
    assert checkpoint == {"optimizer_states": [{"param_groups": [{"lr": 3.0}]}]}
