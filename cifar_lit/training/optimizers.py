"""Optimizers by name, with weight decay on weights only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cifar_lit.errors import UsageError, nearest

OPTIMIZERS = ("sgd", "adamw")


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: weights of two and more dimensions with decay, biases and norms' parameters without it.

    Decay on the latter costs accuracy (He et al., Bag of Tricks, 2019, section 3.1).
    """
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, object]] = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_optimizer(name: str, lr: float, momentum: float, nesterov: bool) -> None:
    """Raises UsageError when an optimizer of these settings cannot be meant."""
    if name not in OPTIMIZERS:
        raise UsageError(f"model.optimizer must be one of {', '.join(OPTIMIZERS)}, not {name!r}.{nearest(name, OPTIMIZERS)}")
    if not lr > 0:
        raise UsageError(f"the learning rate must be above 0, not {lr:g}: set --lr")
    if nesterov and momentum == 0:
        raise UsageError("model.nesterov needs model.momentum above 0")


def build_optimizer(
    net: nn.Module,
    name: str,
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    fused: bool = True,
) -> Optimizer:
    """The optimizer over all trainable parameters of `net`; `fused` does a step in one kernel, on CPUs too."""
    groups = parameter_groups(net, weight_decay)
    one_kernel = True if fused else None  # None lets torch choose among the others
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=one_kernel)
    return AdamW(groups, lr=lr, fused=one_kernel)


def override_optimizer_settings(checkpoint: dict[str, Any], settings: Mapping[str, Any], net: nn.Module) -> None:
    """Writes `settings` over those that a checkpoint's optimizer and schedule would bring back with their states.

    A resumed optimizer keeps its momentum buffers and step counts, but runs at the rate, momentum and decay asked for.
    Raises UsageError for another optimizer, which cannot take those buffers over.
    """
    before = checkpoint.get("hyper_parameters", {})
    if not before.get("lr"):
        return
    if before.get("optimizer") != settings["optimizer"]:
        raise UsageError(
            f"this run was trained with {before.get('optimizer')}, which {settings['optimizer']} cannot go on from: "
            "leave model.optimizer as it was, or start a new run"
        )
    decays = [group["weight_decay"] for group in parameter_groups(net, settings["weight_decay"])]
    scale = settings["lr"] / before["lr"]
    for optimizer in checkpoint.get("optimizer_states", []):
        for group, decay in zip(optimizer["param_groups"], decays, strict=False):
            group["weight_decay"] = decay
            for rate in ("lr", "initial_lr"):
                if rate in group:
                    group[rate] *= scale
            for name in ("momentum", "nesterov"):
                if name in group:
                    group[name] = settings[name]
    for schedule in checkpoint.get("lr_schedulers", []):
        for rates in ("base_lrs", "_last_lr"):
            if rates in schedule:
                schedule[rates] = [rate * scale for rate in schedule[rates]]
