"""Optimizers by name or import path, and their parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from cifar_lit.errors import UsageError, check_choice
from cifar_lit.plugins import accepted_arguments, build_part, find_part, part_name
from cifar_lit.training.captured import can_capture
from cifar_lit.training.muon import Muon
from cifar_lit.training.schedules import SCHEDULES, schedule_from

OPTIMIZERS = ("sgd", "adamw", "muon")
REST_MOMENTUM = 0.85  # SGD part of airbench94_muon

# These settings depend on the machine. A checkpoint does not override them.
MACHINE_SETTINGS = ("fused", "foreach", "capturable", "products")


def parameter_groups(
    net: nn.Module,
    optimizer: str,
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    bias_lr: float | None = None,
    head_lr: float | None = None,
    rest_momentum: float = REST_MOMENTUM,
    rescale_filters: bool = True,
    input_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters of `net` in non-empty groups, each with its `role`, rate and settings.

    All optimizers except muon have two groups: "weights" with two or more dimensions, and "biases" (also of norms).
    Decay of biases costs accuracy, so it is 0 (He et al., Bag of Tricks, 2019, 3.1). With `input_lr`, each group is
    split by depth. Rates rise geometrically to `lr` in the last layers (Howard and Ruder, ULMFiT, 2018, 3.2).

    muon follows airbench94_muon (K. Jordan, 2024). Default rates are `lr`. Rates apply to the mean loss of a batch.
    airbench uses the sum, so its rate of 0.053 for biases at batch size 2,000 is 106 here. The groups:

    - "filters": parameters of two or more dimensions except the head. They use Muon; the others Nesterov SGD.
    - "biases": vectors, also of norms.
    - "head": the last parameter of two dimensions.
    - "whitening": `net.whiten.bias`, if any, whose schedule may end earlier.

    With muon, `weight_decay` is the share that a step at the highest rate removes from a parameter. Filters do not
    decay if `rescale_filters` sets their norm. airbench's decay of 2e-6 per image is 0.027 here at batch size 2,000,
    because momentum multiplies it by 1 / (1 − 0.85).
    """
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    if optimizer != "muon":
        shared: dict[str, Any] = {"lr": lr}
        # An optimizer by import path keeps its default momentum unless `momentum` is set.
        if optimizer == "sgd" or (optimizer != "adamw" and momentum):
            shared |= {"momentum": momentum, "nesterov": nesterov}
        pair = [
            {"role": "weights", "params": weights, **shared, "weight_decay": weight_decay},
            {"role": "biases", "params": others, **shared, "weight_decay": 0.0},
        ]
        pair = [group for group in pair if group["params"]]
        return pair if input_lr is None else [part for group in pair for part in by_depth(group, trained, input_lr)]
    head = next((weight for weight in reversed(weights) if weight.ndim == 2), None)
    whitening = getattr(getattr(net, "whiten", None), "bias", None)
    filters = {"orthogonal": True, "momentum": momentum, "nesterov": nesterov, "rescale": rescale_filters}
    sgd = {"orthogonal": False, "momentum": rest_momentum, "nesterov": True}
    bias_lr = lr if bias_lr is None else bias_lr
    groups: list[dict[str, Any]] = [
        {"role": "filters", "params": [weight for weight in weights if weight is not head], "lr": lr, **filters},
        {"role": "biases", "params": [bias for bias in others if bias is not whitening], "lr": bias_lr, **sgd},
        {"role": "head", "params": [] if head is None else [head], "lr": lr if head_lr is None else head_lr, **sgd},
        {"role": "whitening", "params": [bias for bias in others if bias is whitening], "lr": bias_lr, **sgd},
    ]
    for group in groups:
        # Muon multiplies the decay by the current rate, which is the highest rate times the factor of the schedule.
        group["weight_decay"] = 0.0 if group.get("rescale") else weight_decay / group["lr"]
    return [group for group in groups if group["params"]]


DEPTHS = 8  # groups of adjacent layers


def by_depth(group: dict[str, Any], trained: list[nn.Parameter], input_lr: float) -> list[dict[str, Any]]:
    """Return a group split by depth, with rates from `input_lr`. trained: all trainable parameters in order."""
    count = min(DEPTHS, len(trained))
    depths = {parameter: index * count // len(trained) for index, parameter in enumerate(trained)}
    parts: dict[int, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        parts.setdefault(depths[parameter], []).append(parameter)
    ratio = group["lr"] / input_lr
    return [
        {**group, "params": params, "lr": input_lr * ratio ** (depth / (count - 1) if count > 1 else 1)}
        for depth, params in parts.items()
    ]


# Hyper-parameters of ImageClassifier that are arguments of `parameter_groups`.
GROUP_SETTINGS = tuple(signature(parameter_groups).parameters)[1:]

# A check of the value of each setting, and the message for an invalid value. null is always valid.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        ("momentum", "rest_momentum", "label_smoothing"),
        (lambda value: 0 <= value < 1, "must be 0 or more and below 1"),
    ),
    **dict.fromkeys(
        ("bias_lr", "head_lr", "whiten_epochs", "input_lr"),
        (lambda value: value > 0, "must be above 0, or null"),
    ),
    "weight_decay": (lambda value: value >= 0, "must be 0 or more"),
    "final_lr": (lambda value: 0 <= value <= 1, "is a fraction of model.lr, 0 … 1"),
    "frozen": (lambda value: 0 <= value < 1, "is a share of the net's parameters, from 0 to below 1"),
    "ema_decay": (lambda value: 0 <= value < 1, "must be 0 for none or below 1"),
    "temperature": (lambda value: 0.05 <= value <= 20, "must be from 0.05 to 20, or null"),
    "patience": (lambda value: 0 <= value < math.inf, "is a number of validations, or below 1 a share of them"),
}
# Settings of muon only, with their defaults.
_MUON_ONLY = {
    "bias_lr": None,
    "head_lr": None,
    "whiten_epochs": None,
    "rest_momentum": REST_MOMENTUM,
    "rescale_filters": True,
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for invalid settings of ImageClassifier, or an invalid combination."""
    optimizer, decay = settings["optimizer"], settings["weight_decay"]
    for name, choices in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
        if "." not in settings[name]:  # else an import path, or the name of a class
            check_choice(f"model.{name}", settings[name], choices)
    for name in ("warmup_epochs", "final_lr", "whiten_epochs") if "." in settings["schedule"] else ():
        if settings[name]:
            raise UsageError(f"model.{name} needs one of our schedules: leave it out with {settings['schedule']}")
    if not settings["lr"] > 0:
        raise UsageError(f"the learning rate must be above 0, not {settings['lr']:g}: set --lr")
    for name, (is_valid, range_text) in _RANGES.items():
        if (value := settings[name]) is not None and not is_valid(value):
            raise UsageError(f"model.{name} {range_text}, not {value:g}")
    if settings["nesterov"] and settings["momentum"] == 0:
        raise UsageError("model.nesterov needs model.momentum above 0")
    if optimizer == "muon" and settings["input_lr"] is not None:
        raise UsageError("model.optimizer muon does not support model.input_lr: use adamw or sgd")
    if optimizer == "muon" and decay >= 1:
        raise UsageError(f"model.weight_decay is a share per step under muon, below 1, not {decay:g}")
    for name, default in _MUON_ONLY.items():
        if optimizer != "muon" and settings[name] != default:
            text = "null" if default is None else str(default).lower()
            raise UsageError(f"model.{name} needs model.optimizer muon: leave it out, or set --model.{name} {text}")
    if settings["schedule_every"] not in ("step", "epoch"):
        raise UsageError(f"model.schedule_every must be step or epoch, not {settings['schedule_every']!r}")
    if settings["schedule_every"] == "epoch" and (settings["warmup_epochs"] or settings["schedule"] == "one_cycle"):
        raise UsageError("with a warm-up, the first epoch would train at final_lr: use model.schedule_every step")


def build_optimizer(
    net: nn.Module,
    optimizer: str | Callable[..., Optimizer] | Optimizer,
    lr: float,
    *,
    precision: str = "bf16-mixed",
    capturable: bool = False,
    **settings: Any,
) -> Optimizer:
    """Return the optimizer of all trainable parameters of `net`.

    sgd and adamw are fused, on CPUs too, because only fused kernels support `found_inf`. Muon supports it.

    Args:
        net: the net, on the device where it is trained.
        optimizer: one of OPTIMIZERS; or a torch optimizer, which is returned; or a class or function, or the import
            path of one, which is called with the groups and, if it accepts it, `lr`. `lr` and `weight_decay` that a
            partial or a function sets itself take precedence.
        lr: highest learning rate.
        precision: precision of the Trainer. Without bf16, which may be slow, Muon's products are float32.
        capturable: keep the rate of each group in a 0-dim float32 tensor on the device, which captured steps read.
        **settings: see `parameter_groups`.

    Raises:
        UsageError: if the import path is not of an optimizer, or the optimizer ignores a setting.
    """
    name = part_name(optimizer)
    groups = parameter_groups(net, name, lr, **settings)
    first = groups[0]["params"][0]
    if capturable:
        for group in groups:
            group["lr"] = first.new_tensor(group["lr"], dtype=torch.float32)
    built: Optimizer
    if optimizer == "muon":
        products = "bfloat16" if "bf16" in precision else "float32"
        built = Muon(groups, lr, steps=3, products=products, branches=capturable)
    elif optimizer == "adamw":
        built = AdamW(groups, lr, fused=True, capturable=capturable)
    elif optimizer == "sgd":
        built = SGD(groups, lr, fused=True)
        for group in built.param_groups:
            # Create the buffers here: torch leaves new buffers uninitialised if `found_inf` skips the first step.
            for parameter in group["params"] if group["momentum"] else ():
                built.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    elif capturable:
        raise UsageError(f"a step of {name} cannot be captured: add --model.capture false")
    elif isinstance(optimizer, Optimizer):
        built = optimizer
    else:
        build = find_part(optimizer, "model.optimizer")
        accepted = accepted_arguments(build, {"lr": lr, "weight_decay": 0.0})
        for group in groups:  # their values would replace those that a function sets itself
            if "lr" not in accepted and settings.get("input_lr") is None:
                del group["lr"]
            if "weight_decay" not in accepted and group["role"] == "weights" and not group["weight_decay"]:
                del group["weight_decay"]
        built = build_part(build, "model.optimizer", Optimizer, groups, lr=lr)
        for setting in ("momentum", "nesterov", "weight_decay"):
            if settings.get(setting) and setting not in built.defaults:
                raise UsageError(f"{name} takes no {setting}: leave model.{setting} out, or set it to 0")
    # A fused step would unscale gradients after clipping. Lightning's precision plugin unscales them before clipping.
    built._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    _keep_machine_settings(built)
    return built


def configure_optimizers(net: nn.Module, settings: Mapping[str, Any], trainer: Any) -> Any:
    """Return the optimizer and, unless rates are constant, its schedule, as Lightning expects them.

    Raises UsageError for a schedule if the training has no limit.
    """
    captures = can_capture(trainer, settings["capture"])
    groups = {name: settings[name] for name in GROUP_SETTINGS}
    optimizer = build_optimizer(net, precision=str(trainer.precision), capturable=captures, **groups)
    if settings["schedule"] == "constant" and not settings["warmup_epochs"] and settings["whiten_epochs"] is None:
        return optimizer
    trainer.fit_loop.setup_data()  # sets num_training_batches; Lightning's estimate may skip this
    steps = trainer.estimated_stepping_batches
    if steps == math.inf:
        raise UsageError("a schedule needs an end: set --epochs or --trainer.max_steps, or --model.schedule constant")
    steps_per_epoch = max(1, -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches))
    schedule = schedule_from(optimizer, settings, int(steps), steps_per_epoch)
    every = "epoch" if isinstance(schedule, ReduceLROnPlateau) else settings["schedule_every"]
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": every, "monitor": "val/loss"}}


def _keep_machine_settings(optimizer: Optimizer) -> None:
    """Make state dicts independent of the machine: save rates as floats, and never load MACHINE_SETTINGS."""
    settings = [{name: group[name] for name in MACHINE_SETTINGS if name in group} for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]

    def plain_rates(optimizer: Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])

    def own_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = state["param_groups"]
        if len(groups) != len(settings):
            return state  # torch raises an error
        return {**state, "param_groups": [{**group, **own} for group, own in zip(groups, settings, strict=True)]}

    def rates_in_place(optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):
                group["lr"] = rate.fill_(group["lr"])

    optimizer.register_state_dict_post_hook(plain_rates)
    optimizer.register_load_state_dict_pre_hook(own_settings)
    optimizer.register_load_state_dict_post_hook(rates_in_place)
