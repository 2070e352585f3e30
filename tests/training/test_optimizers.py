"""Optimizers by name equal torch's. Parameter groups, their state on resume, and Muon's settings."""

from typing import Any

import pytest
import torch
from small_runs import assert_close
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cifar_lit.training.optimizers import OPTIMIZERS, align_restored_state, build_optimizer
from cifar_lit.training.schedules import Schedule

# Rates and decays that distinguish Muon's groups.
RATES: dict[str, Any] = {"weight_decay": 0.004, "bias_lr": 100.0, "head_lr": 1000.0}
SETTINGS: dict[str, Any] = {"momentum": 0.6, "nesterov": True, **RATES}


class Whitened(nn.Module):
    """A small net with the parameter types of the whitened net."""

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
        return self.head(self.hidden(self.norm(self.conv(self.whiten(images))).mean((2, 3))))


MATRICES = ["conv.weight", "hidden.weight", "head.weight"]


def train(optimizer: Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """Return the net's state after four steps."""
    dtype = next(net.parameters()).dtype
    for step in range(4):
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step), dtype=dtype)
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()
    return net.state_dict()


def decay_alone(optimizer: Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """Take a step with zero gradients, and return the parameters before it."""
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return before


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_sgd_and_adamw_equal_torchs_with_decay_on_weights_only(name: str) -> None:
    settings: dict[str, Any] = {"momentum": 0.8, "nesterov": True} if name == "sgd" else {"weight_decay": 0}
    ours, theirs = Whitened().double(), Whitened().double()
    torchs = (SGD if name == "sgd" else AdamW)(theirs.parameters(), lr=0.01, **settings)
    expected = train(torchs, theirs)
    assert_close(train(build_optimizer(ours, name, 0.01, settings), ours), expected, atol=1e-9)
    net = Whitened()
    before = decay_alone(build_optimizer(net, name, 0.1, {"weight_decay": 0.5}), net)
    expected = {key: tensor * (0.95 if key in MATRICES else 1) for key, tensor in before.items()}
    assert_close(dict(net.named_parameters()), expected)


def test_muons_decay_is_a_share_per_step_that_follows_the_schedule_not_the_rate() -> None:
    net = Whitened()
    optimizer = build_optimizer(net, "muon", 0.25, SETTINGS)
    schedule = Schedule(optimizer, "triangular", 4)
    for share in (0.004, 0.003, 0.002, 0.001, 0.0):
        before = decay_alone(optimizer, net)
        schedule.step()
        expected = {name: tensor * (1 - share) for name, tensor in before.items()}
        expected["whiten.weight"] = before["whiten.weight"]
        expected |= {name: before[name] * len(before[name]) ** 0.5 / before[name].norm() for name in MATRICES[:2]}
        assert_close(dict(net.named_parameters()), expected, rtol=1e-5)


# ---- groups


def groups_of(net: nn.Module, optimizer: str, **options: Any) -> list[dict[str, Any]]:
    return build_optimizer(net, optimizer, 0.25, options).param_groups


def names(net: nn.Module, optimizer: str) -> dict[str, list[str]]:
    """Return the names of the parameters by the role of their group."""
    names_by_id = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = groups_of(net, optimizer)
    return {group["role"]: [names_by_id[id(parameter)] for parameter in group["params"]] for group in groups}


def test_parameters_are_grouped_by_type_with_rates_per_group() -> None:
    biases = ["norm.weight", "norm.bias", "hidden.bias"]
    for name in ("sgd", "adamw"):
        assert names(Whitened(), name) == {"weights": MATRICES, "biases": ["whiten.bias", *biases]}
    roles = {"filters": MATRICES[:2], "biases": biases, "head": MATRICES[2:], "whitening": ["whiten.bias"]}
    assert list(names(Whitened(), "muon").items()) == list(roles.items())
    frozen = Whitened()
    frozen.whiten.requires_grad_(False)
    assert list(names(frozen, "muon")) == ["filters", "biases", "head"]
    assert all(len(groups_of(nn.Linear(3, 2, bias=False), name)) == 1 for name in OPTIMIZERS)

    groups = groups_of(Whitened(), "muon", **SETTINGS)
    assert [group["lr"] for group in groups] == [0.25, 100.0, 1000.0, 100.0]
    assert [group["momentum"] for group in groups] == [0.6, 0.85, 0.85, 0.85]
    assert [group["orthogonal"] for group in groups] == [True, False, False, False]
    assert {group["lr"] for group in groups_of(Whitened(), "muon")} == {0.25}


def test_adamw_and_sgd_without_settings_are_torchs_and_muon_is_airbenchs() -> None:
    for name, kind in (("adamw", AdamW), ("sgd", SGD)):
        ours, torchs = groups_of(Whitened(), name)[0], kind([torch.zeros(1)], 0.25).param_groups[0]
        assert {key: ours[key] for key in torchs.keys() - {"params", "fused"}} == {
            key: torchs[key] for key in torchs.keys() - {"params", "fused"}
        }
    muon = groups_of(Whitened(), "muon")[0]
    assert (muon["momentum"], muon["nesterov"]) == (0.6, True)


def test_a_function_may_set_the_rate_itself() -> None:
    def own_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.5)

    assert [group["lr"] for group in build_optimizer(Whitened(), own_sgd, 0.1).param_groups] == [0.5, 0.5]


# ---- checkpoints


def test_a_restored_momentum_with_overlapping_memory_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9, fused=True)
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(4).as_strided((4,), (0,), 3)
    align_restored_state(optimizer)
    assert optimizer.state[parameter]["momentum_buffer"].stride() == (1,)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0] * 4
