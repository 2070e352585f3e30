"""Optimizers by name, each with settings of its own, and optimizers of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cifar_lit.base.errors import UsageError, check_choice
from cifar_lit.base.plugins import accepted_arguments, build_part, find_part, part_name
from cifar_lit.base.settings import options_of

Group = dict[str, Any]  # a parameter group of torch, with its `role`


def weights_and_biases(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters of two or more dimensions, and the others: biases and vectors of norms."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    biases = [parameter for parameter in trained if parameter.ndim <= 1]
    return weights, biases


def pair_of_groups(net: nn.Module, lr: float, weight_decay: float, **shared: object) -> list[Group]:
    """Return the groups "weights" and "biases" of a net, without empty ones.

    Decay of biases costs accuracy, so it is 0 (He et al., Bag of Tricks, 2019, 3.1).
    """
    weights, biases = weights_and_biases(net)
    groups = [
        {"role": "weights", "params": weights, "lr": lr, **shared, "weight_decay": weight_decay},
        {"role": "biases", "params": biases, "lr": lr, **shared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class SGDSettings:
    """Stochastic gradient descent, fused, with decay of weights coupled to the gradient.

    Args:
        momentum: from 0 to below 1.
        nesterov: use Nesterov momentum.
        weight_decay: decay of weights, not of biases and norms.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def groups(self, net: nn.Module, lr: float) -> list[Group]:
        """Return the parameter groups of a net."""
        return pair_of_groups(net, lr, self.weight_decay, momentum=self.momentum, nesterov=self.nesterov)

    def build(self, groups: list[Group], lr: float, precision: str) -> Optimizer:
        """Return the optimizer."""
        return SGD(groups, lr, fused=True)


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW, fused, with decoupled decay of weights (Loshchilov and Hutter, 2019).

    Args:
        weight_decay: decay of weights, not of biases and norms. The default is torch's.
    """

    weight_decay: float = 0.01

    def groups(self, net: nn.Module, lr: float) -> list[Group]:
        """Return the parameter groups of a net."""
        return pair_of_groups(net, lr, self.weight_decay)

    def build(self, groups: list[Group], lr: float, precision: str) -> Optimizer:
        """Return the optimizer."""
        return AdamW(groups, lr, fused=True)


@dataclass(frozen=True)
class MuonSettings:
    """Muon for filters and Nesterov SGD for the other parameters, as airbench94_muon (K. Jordan, 2024).

    Filters are rescaled to norm √outputs at every step, so they do not decay.

    Rates apply to the mean loss of a batch. airbench uses the sum, so its rate of 0.053 for biases at batch size 2,000
    is 106 here.

    Args:
        momentum: momentum of the filters, from 0 to below 1. This default and the next are airbench's.
        nesterov: use Nesterov momentum for the filters.
        weight_decay: share that each step at the highest rate removes from parameters other than filters. airbench's
            decay of 2e-6 per image is 0.027 at batch size 2,000, because momentum multiplies it by 1 / (1 − 0.85).
        bias_lr: learning rate of biases and norms. Default: lr.
        head_lr: learning rate of the last layer. Default: lr.
        rest_momentum: momentum of the SGD part.
    """

    momentum: float = 0.6
    nesterov: bool = True
    weight_decay: float = 0.0
    bias_lr: float | None = None
    head_lr: float | None = None
    rest_momentum: float = 0.85

    def groups(self, net: nn.Module, lr: float) -> list[Group]:
        """Return the parameter groups of a net, by role.

        - "filters": parameters of two or more dimensions except the head. They use Muon; the others Nesterov SGD.
        - "biases": vectors, also of norms.
        - "head": the last parameter of two dimensions.
        - "whitening": `net.whiten.bias`, if any, whose schedule may end earlier.
        """
        weights, biases = weights_and_biases(net)
        heads = [weight for weight in weights if weight.ndim == 2][-1:]
        filters_only = [weight for weight in weights if not any(weight is head for head in heads)]
        whitening_bias = getattr(getattr(net, "whiten", None), "bias", None)
        whitening = [bias for bias in biases if bias is whitening_bias]
        other_biases = [bias for bias in biases if bias is not whitening_bias]
        bias_lr = self.bias_lr or lr
        head_lr = self.head_lr or lr
        muon: Group = {
            "orthogonal": True, "momentum": self.momentum, "nesterov": self.nesterov, "rescale": True,
        }  # fmt: skip
        sgd: Group = {"orthogonal": False, "momentum": self.rest_momentum, "nesterov": True}
        groups: list[Group] = [
            {"role": "filters", "params": filters_only, "lr": lr, **muon},
            {"role": "biases", "params": other_biases, "lr": bias_lr, **sgd},
            {"role": "head", "params": heads, "lr": head_lr, **sgd},
            {"role": "whitening", "params": whitening, "lr": bias_lr, **sgd},
        ]
        for group in groups:
            # Muon multiplies the decay by the current rate, which is the highest rate times the factor of the schedule.
            group["weight_decay"] = self.weight_decay / group["lr"]
        groups[0]["weight_decay"] = 0.0
        return [group for group in groups if group["params"]]

    def build(self, groups: list[Group], lr: float, precision: str) -> Optimizer:
        """Return the optimizer. Without bf16, which may be slow, its products are float32."""
        from cifar_lit.training.muon import Muon

        products = "bfloat16" if "bf16" in precision else "float32"
        return Muon(groups, lr, steps=3, products=products)


OPTIONS = "model.optimizer_options"
OPTIMIZERS = {"sgd": SGDSettings, "adamw": AdamWSettings, "muon": MuonSettings}
OptimizerSettings = SGDSettings | AdamWSettings | MuonSettings


def optimizer_settings(name: str, options: Mapping[str, object] | None) -> OptimizerSettings | None:
    """Return the settings of one of OPTIMIZERS, None for an import path; raise UsageError for invalid ones."""
    if "." in name:  # an import path, or the name of a class
        return None
    check_choice("model.optimizer", name, (*OPTIMIZERS, "an import path such as torch.optim.Adam"))
    return options_of(OPTIMIZERS[name], options, OPTIONS, f"{name} has")


def as_given(groups: list[Group]) -> list[Group]:
    """Return parameter groups unchanged."""
    return groups


def build_optimizer(
    net: nn.Module,
    optimizer: str | Callable[..., Optimizer] | Optimizer,
    lr: float,
    options: Mapping[str, object] | None = None,
    *,
    precision: str = "bf16-mixed",
    regroup: Callable[[list[Group]], list[Group]] = as_given,
) -> Optimizer:
    """Return the optimizer of all trainable parameters of `net`.

    Args:
        net: the net, on the device where it is trained.
        optimizer: one of OPTIMIZERS; or a torch optimizer, which is returned; or a class or function, or the import
            path of one, which is called with the groups, `lr` if it accepts it, and the options.
        lr: highest learning rate. A rate that a partial or a function sets itself takes precedence.
        regroup: changes the parameter groups of an optimizer by name, class or function.

    Raises:
        UsageError: if the import path is not of an optimizer, or an option is invalid.
    """
    name, options = part_name(optimizer), dict(options or {})
    settings = optimizer_settings(name, options)
    if isinstance(optimizer, Optimizer):
        built = optimizer
    elif settings is None:
        built = _build_foreign(net, optimizer, lr, options, regroup)
    else:
        built = settings.build(regroup(settings.groups(net, lr)), lr, precision)
    # A fused step would unscale gradients after clipping. Lightning's precision plugin unscales them before clipping.
    built._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return built


def _build_foreign(net: nn.Module, optimizer: object, lr: float, options: dict[str, Any], regroup: Any) -> Optimizer:
    """Return an optimizer of another package. Its `weight_decay`, if any, does not decay biases and norms."""
    build = find_part(optimizer)
    accepted = accepted_arguments(build, {"lr": lr, **options})
    for option in options:
        if option not in accepted:
            raise UsageError(f"{part_name(optimizer)} takes no {option}: leave {OPTIONS}.{option} out")
    groups = regroup(pair_of_groups(net, lr, options.get("weight_decay", 0.0)))
    for group in groups:
        # A value in a group would replace the one that the function sets itself.
        if "lr" not in accepted:
            del group["lr"]
        if group["role"] == "weights" and "weight_decay" not in options:
            del group["weight_decay"]
    built: Optimizer = build_part(build, Optimizer, groups, lr=lr, **options)
    return built


def align_restored_state(optimizer: Optimizer) -> None:
    """Lay restored state out like its parameter: fused kernels would read and write out of bounds."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name in ("momentum_buffer", "exp_avg", "exp_avg_sq") and value is not None:
                state[name] = torch.empty_like(parameter).copy_(value)
