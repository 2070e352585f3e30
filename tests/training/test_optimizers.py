"""Optimizers by name: torch's own, groups of parameters, what a resumed training brings back, and Muon's settings."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.plugins import allow_imports
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    override_optimizer_settings,
    parameter_groups,
)
from cifar_lit.training.schedules import Schedule


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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.8, "nesterov": True}),
        ("adamw", {}),
    ],
)
def test_without_decay_they_are_torchs(name: str, settings: dict[str, Any]) -> None:
    ours, theirs = net(), net()
    torchs = (
        SGD(theirs.parameters(), lr=0.01, **settings) if name == "sgd" else AdamW(theirs.parameters(), lr=0.01, weight_decay=0)
    )
    assert_equal(stepped(ours, build_optimizer(ours, name, 0.01, **settings)), stepped(theirs, torchs))


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
    assert len(parameter_groups(nn.Linear(3, 2, bias=False), name, 0.1)) == 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"optimizer": "adam"}, "Did you mean adamw"),
        ({"lr": 0.0}, "above 0, not 0: set --lr"),
        ({"lr": -1.0}, "above 0, not -1"),
        ({"lr": float("nan")}, "above 0, not nan"),
        ({"momentum": 0.0}, "nesterov needs model.momentum"),
        ({"momentum": 1.0}, "momentum must be 0 or more and below 1, not 1"),
        ({"bias_lr": 0.0}, "bias_lr must be above 0, or null"),
        ({"head_lr": float("nan")}, "head_lr must be above 0"),
        ({"whiten_epochs": -1.0}, "whiten_epochs must be above 0"),
        ({"rest_momentum": 1.0}, "rest_momentum must be 0 or more and below 1"),
        ({"weight_decay": -1e-3}, "weight_decay must be 0 or more"),
        ({"weight_decay": 1.0}, "a share per step under muon, below 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ImageClassifier("lenet", **{"optimizer": "muon", "lr": 0.1, "momentum": 0.6, "nesterov": True, **settings})


def test_an_optimizer_by_import_path_is_built_with_the_settings_that_it_knows() -> None:
    allow_imports(["torch.optim.RMSprop", "torch.optim.Adagrad"])
    weights, biases = build_optimizer(net(), "torch.optim.RMSprop", 0.1, momentum=0.5, weight_decay=0.01).param_groups
    assert [(group["lr"], group["momentum"]) for group in (weights, biases)] == [(0.1, 0.5)] * 2
    assert (weights["weight_decay"], biases["weight_decay"]) == (0.01, 0.0)
    with pytest.raises(UsageError, match=r"torch\.optim\.Adagrad takes no momentum"):
        build_optimizer(net(), "torch.optim.Adagrad", 0.1, momentum=0.5)
    with pytest.raises(UsageError, match=r"add --model\.capture false"):
        build_optimizer(net(), "torch.optim.RMSprop", 0.1, capturable=True)
    with pytest.raises(UsageError, match=r"torch\.optim\.SGD would run code"):
        build_optimizer(net(), "torch.optim.SGD", 0.1)


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
    with pytest.raises(UsageError, match="was trained with sgd"):
        overridden(checkpoint, model, optimizer="adamw")
    foreign = {"optimizer_states": [{"param_groups": [{"lr": 3.0}]}]}
    override_optimizer_settings(foreign, {"lr": 0.1, "optimizer": "sgd"}, model)
    assert foreign == {"optimizer_states": [{"param_groups": [{"lr": 3.0}]}]}  # which are not ours to judge


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
def test_a_new_decay_is_that_of_the_weights_alone_and_a_new_momentum_counts(before: float, after: float) -> None:
    checkpoint, model = saved("sgd", lr=0.2, weight_decay=before)
    groups = overridden(checkpoint, model, weight_decay=after)["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [after, 0.0]
    groups = overridden(checkpoint, model, momentum=0.5, nesterov=True)["optimizer_states"][0]["param_groups"]
    assert [(group["momentum"], group["nesterov"]) for group in groups] == [(0.5, True)] * 2


# ---- Muon as a setting: which parameter gets which rate, momentum and decay, and what of it a checkpoint keeps

# Rates and decays that tell the groups apart.
SETTINGS: dict[str, Any] = {"momentum": 0.6, "nesterov": True, "weight_decay": 0.004, "bias_lr": 100.0, "head_lr": 1000.0}


class Whitened(nn.Module):
    """Like the whitened net in what its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whiten = nn.Conv2d(3, 4, 2)
        self.whiten.weight.requires_grad = False
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.norm(self.conv(self.whiten(images))).mean((2, 3))))
        return logits


def names(net: nn.Module, **settings: Any) -> dict[str, list[str]]:
    """The parameters' names by the role of their group, in the groups' order."""
    known = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = parameter_groups(net, "muon", 0.24, **settings)
    return {group["role"]: [known[id(parameter)] for parameter in group["params"]] for group in groups}


def trained(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int, schedule: Schedule | None = None) -> None:
    for step in range(steps):
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def test_filters_biases_head_and_whitening_are_groups_in_this_order() -> None:
    assert list(names(Whitened()).items()) == [
        ("filters", ["conv.weight", "hidden.weight"]),
        ("biases", ["norm.weight", "norm.bias", "hidden.bias"]),
        ("head", ["head.weight"]),
        ("whitening", ["whiten.bias"]),
    ]


def test_a_whitening_bias_that_is_frozen_or_missing_makes_no_group() -> None:
    frozen, missing = Whitened(), Whitened()
    assert frozen.whiten.bias is not None
    frozen.whiten.bias.requires_grad = False
    missing.whiten = nn.Conv2d(3, 4, 2, bias=False)
    assert list(names(frozen)) == list(names(missing)) == ["filters", "biases", "head"]


@pytest.mark.parametrize(("net", "head"), [("resnet18", "fc.weight"), ("tudui", None)])
def test_the_last_linear_layer_of_other_nets_is_the_head(net: str, head: str | None) -> None:
    model = build_net(net, channels=3, image_size=32, num_classes=10)
    found = names(model)
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim == 2]
    assert found["head"] == [head or matrices[-1]]
    assert sorted(found["filters"]) == sorted(
        name for name, parameter in model.named_parameters() if parameter.ndim > 1 and name != found["head"][0]
    )
    assert list(found) == ["filters", "biases", "head"]


def test_each_group_has_its_rate_and_rates_not_given_are_the_filters() -> None:
    given = parameter_groups(Whitened(), "muon", 0.25, **SETTINGS)
    assert [group["lr"] for group in given] == [0.25, 100.0, 1000.0, 100.0]
    assert [group["momentum"] for group in given] == [0.6, 0.85, 0.85, 0.85]
    assert [group["orthogonal"] for group in given] == [True, False, False, False]
    assert {group["lr"] for group in parameter_groups(Whitened(), "muon", 0.25)} == {0.25}


@pytest.mark.parametrize("rescale", [True, False])
def test_decay_is_a_share_per_step_that_falls_with_the_schedule_whatever_the_rate(rescale: bool) -> None:
    model = Whitened()
    optimizer = build_optimizer(model, "muon", 0.25, **SETTINGS, rescale_filters=rescale)
    schedule = Schedule(optimizer, "triangular", 4)
    for share in (0.004, 0.003, 0.002, 0.001, 0.0):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedule.step()
        for name, was in before.items():
            if name == "whiten.weight":  # frozen
                expected = was
            elif rescale and name in ("conv.weight", "hidden.weight"):
                expected = was * len(was) ** 0.5 / was.norm()
            else:
                expected = was * (1 - share)
            torch.testing.assert_close(model.get_parameter(name).detach(), expected, msg=name)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "settings",
    [{"bias_lr": 1.0}, {"head_lr": 1.0}, {"whiten_epochs": 3.0}, {"rest_momentum": 0.9}, {"rescale_filters": False}],
)
def test_muons_settings_are_refused_with_other_optimizers(name: str, settings: dict[str, Any]) -> None:
    setting = next(iter(settings))
    with pytest.raises(UsageError, match=rf"model\.{setting} goes only with model.optimizer muon.* set --model\.{setting} \S+$"):
        ImageClassifier("lenet", optimizer=name, **settings)
    ImageClassifier("lenet", optimizer="muon", **settings)


def test_new_settings_on_resume_reach_each_group_at_the_point_the_schedule_had_come_to() -> None:
    model = Whitened()
    optimizer = build_optimizer(model, "muon", 0.25, **SETTINGS)
    schedule = Schedule(optimizer, "triangular", 4, whitening=2)
    trained(optimizer, model, 1, schedule)
    known = {"optimizer": "muon", "lr": 0.25, **SETTINGS, "rest_momentum": 0.85, "rescale_filters": True}
    saved = {
        "hyper_parameters": known,
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
    }
    same = copy.deepcopy(saved)
    override_optimizer_settings(same, known, model)
    assert same["optimizer_states"][0]["param_groups"] == saved["optimizer_states"][0]["param_groups"]  # type: ignore[index]

    asked = {**known, "lr": 0.5, "head_lr": None, "bias_lr": 10.0, "rest_momentum": 0.9, "weight_decay": 0.01}
    override_optimizer_settings(saved, {**asked, "rescale_filters": False}, model)
    groups: Any = saved["optimizer_states"][0]["param_groups"]  # type: ignore[index]
    assert [group["initial_lr"] for group in groups] == pytest.approx([0.5, 10.0, 0.5, 10.0])
    assert [group["lr"] for group in groups] == pytest.approx([0.375, 7.5, 0.375, 5.0])
    assert [group["momentum"] for group in groups] == [0.6, 0.9, 0.9, 0.9]
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.02, 0.001, 0.02, 0.001])
    assert groups[0]["rescale"] is False
    schedule_state: Any = saved["lr_schedulers"][0]
    assert schedule_state["base_lrs"] == pytest.approx([0.5, 10.0, 0.5, 10.0])
    assert schedule_state["_last_lr"] == pytest.approx([0.375, 7.5, 0.375, 5.0])


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_training_goes_on_exactly_on_a_machine_that_keeps_its_rates_elsewhere(name: str, first: bool, second: bool) -> None:
    settings: dict[str, Any] = {"momentum": 0.6} if name != "adamw" else {}

    def fresh(capturable: bool) -> tuple[Whitened, torch.optim.Optimizer, Schedule]:
        model = Whitened()
        optimizer = build_optimizer(model, name, 2**-5, capturable=capturable, **settings)
        return model, optimizer, Schedule(optimizer, "triangular", 8)

    whole, optimizer, schedule = fresh(second)
    trained(optimizer, whole, 6, schedule)
    before, optimizer, schedule = fresh(first)
    trained(optimizer, before, 3, schedule)
    saved = copy.deepcopy([before.state_dict(), optimizer.state_dict(), schedule.state_dict()])
    assert all(type(group[rate]) is float for group in saved[1]["param_groups"] for rate in ("lr", "initial_lr"))
    assert all(type(rate) is float for kind in ("base_lrs", "_last_lr") for rate in saved[2][kind])

    after, optimizer, schedule = fresh(second)
    rates = [group["lr"] for group in optimizer.param_groups]
    after.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    assert all(group.get("capturable", second) is second for group in optimizer.param_groups)
    if second:  # a captured step reads these very tensors
        assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    for step in range(3, 6):
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        after(images).square().mean().backward()
        optimizer.step()
        schedule.step()
    for key, tensor in whole.state_dict().items():
        torch.testing.assert_close(after.state_dict()[key], tensor, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_step_that_found_inf_skips_leaves_no_trace_even_as_the_first(name: str) -> None:
    models = [Whitened() for _ in range(2)]
    settings: dict[str, Any] = {"momentum": 0.6} if name != "adamw" else {}
    optimizers = [build_optimizer(model, name, 0.01, capturable=True, **settings) for model in models]
    for parameter in models[0].parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizers[0].found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizers[0].step()
    optimizers[0].found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(optimizer, model, 2)
    for key, tensor in models[1].state_dict().items():
        torch.testing.assert_close(models[0].state_dict()[key], tensor, msg=key)
