"""Optimizers by name or import path, over groups of parameters by what they are for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cifar_lit.errors import UsageError, check_choice
from cifar_lit.plugins import import_callable
from cifar_lit.training.captured import can_capture
from cifar_lit.training.muon import Muon
from cifar_lit.training.schedules import SCHEDULES, schedule_from

OPTIMIZERS = ("sgd", "adamw", "muon")
REST_MOMENTUM = 0.85  # of airbench94_muon's SGD part

# How a group's step is computed is for the machine to say, not for a checkpoint from another one.
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
    """The trainable parameters of `net` in groups, each with its `role`, rate and settings; empty groups are left out.

    sgd, adamw and those by import path: "weights" of two dimensions or more, with decay, and "biases" (norms' parameters too)
    without it: decay on the latter costs accuracy (He et al., Bag of Tricks, 2019, section 3.1). With `input_lr` in groups of
    neighbouring layers, whose rates rise in equal steps of their logarithm from that of the first layer to `lr` of the last one
    (J. Howard and S. Ruder, Universal Language Model Fine-tuning, 2018, section 3.2).

    muon, which follows airbench94_muon (K. Jordan, 2024), has Muon for "filters", what has two dimensions or more but the head,
    and Nesterov's SGD with `rest_momentum` for "biases", of norms too; for the "head", the last parameter of two dimensions; and
    for "whitening", `net.whiten.bias` where there is one, whose rate has an end of its own. Rates not given are `lr`. All are for
    the mean loss of a batch: airbench sums it, so that its 0.053 for biases at batch 2,000 is 106 here.

    Under muon `weight_decay` is the share of itself that a parameter loses in a step at the highest rate, less as the
    schedule falls, whatever its group's rate. Filters have none while `rescale_filters` sets their norm. airbench's is
    2e-6 · batch, but within the gradient, where momentum makes it 1 / (1 − 0.85) as much: 0.027 here at batch 2,000.
    """
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    if optimizer != "muon":
        shared: dict[str, Any] = {"lr": lr}
        if optimizer == "sgd" or (
            optimizer != "adamw" and momentum
        ):  # one by import path keeps its own where none is set
            shared |= {"momentum": momentum, "nesterov": nesterov}
        decays = (("weights", weights, weight_decay), ("biases", others, 0.0))
        plain = [
            {"role": role, "params": params, **shared, "weight_decay": decay}
            for role, params, decay in decays
            if params
        ]
        return plain if input_lr is None else [part for group in plain for part in by_depth(group, trained, input_lr)]
    head = next((weight for weight in reversed(weights) if weight.ndim == 2), None)
    whitening = getattr(getattr(net, "whiten", None), "bias", None)
    filters = {"orthogonal": True, "momentum": momentum, "nesterov": nesterov, "rescale": rescale_filters}
    rest = {"orthogonal": False, "momentum": rest_momentum, "nesterov": True}
    bias_lr = lr if bias_lr is None else bias_lr
    groups: list[dict[str, Any]] = [
        {"role": "filters", "params": [weight for weight in weights if weight is not head], "lr": lr, **filters},
        {"role": "biases", "params": [bias for bias in others if bias is not whitening], "lr": bias_lr, **rest},
        {"role": "head", "params": [] if head is None else [head], "lr": lr if head_lr is None else head_lr, **rest},
        {"role": "whitening", "params": [bias for bias in others if bias is whitening], "lr": bias_lr, **rest},
    ]
    for group in groups:
        # the optimizer multiplies by the rate, which holds the schedule's factor and the highest rate
        group["weight_decay"] = 0.0 if group.get("rescale") else weight_decay / group["lr"]
    return [group for group in groups if group["params"]]


DEPTHS = 8  # groups of neighbouring layers


def by_depth(group: dict[str, Any], trained: list[nn.Parameter], input_lr: float) -> list[dict[str, Any]]:
    """A group cut by the depth of its parameters, the first layers' at `input_lr`; `trained` has all in the net's order."""
    count = min(DEPTHS, len(trained))
    depths = {parameter: place * count // len(trained) for place, parameter in enumerate(trained)}
    parts: dict[int, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        parts.setdefault(depths[parameter], []).append(parameter)
    ratio = group["lr"] / input_lr
    return [
        {**group, "params": params, "lr": input_lr * ratio ** (depth / (count - 1) if count > 1 else 1)}
        for depth, params in parts.items()
    ]


# Under the names that ImageClassifier's hyper-parameters have.
GROUP_SETTINGS = tuple(signature(parameter_groups).parameters)[1:]

# Which values of a setting can be meant, and how others are answered; null is always one of them.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        ("momentum", "rest_momentum", "label_smoothing"),
        (lambda value: 0 <= value < 1, "must be 0 or more and below 1"),
    ),
    **dict.fromkeys(
        ("bias_lr", "head_lr", "whiten_epochs", "input_lr"),
        (lambda value: value > 0, "must be above 0, or null for none of its own"),
    ),
    "weight_decay": (lambda value: value >= 0, "must be 0 or more"),
    "final_lr": (lambda value: 0 <= value <= 1, "is a fraction of model.lr, 0 … 1"),
    "frozen": (lambda value: 0 <= value < 1, "is a share of the net's parameters, from 0 to below 1"),
    "ema_decay": (lambda value: 0 <= value < 1, "must be 0 for none or below 1"),
    "patience": (lambda value: 0 <= value < math.inf, "is a number of validations, or below 1 a share of them"),
}
# What other optimizers than muon leave at these values.
_MUON_ONLY = {
    "bias_lr": None,
    "head_lr": None,
    "whiten_epochs": None,
    "rest_momentum": REST_MOMENTUM,
    "rescale_filters": True,
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises UsageError when these settings of ImageClassifier cannot be meant, or not together."""
    optimizer, decay = settings["optimizer"], settings["weight_decay"]
    if "." not in optimizer:  # else an import path
        check_choice("model.optimizer", optimizer, OPTIMIZERS)
    check_choice("model.schedule", settings["schedule"], SCHEDULES)
    if not settings["lr"] > 0:
        raise UsageError(f"the learning rate must be above 0, not {settings['lr']:g}: set --lr")
    for name, (fits, range_text) in _RANGES.items():
        if (value := settings[name]) is not None and not fits(value):
            raise UsageError(f"model.{name} {range_text}, not {value:g}")
    if settings["nesterov"] and settings["momentum"] == 0:
        raise UsageError("model.nesterov needs model.momentum above 0")
    if optimizer == "muon" and settings["input_lr"] is not None:
        raise UsageError("model.input_lr does not go with model.optimizer muon: use adamw or sgd")
    if optimizer == "muon" and decay >= 1:
        raise UsageError(f"model.weight_decay is a share per step under muon, below 1, not {decay:g}")
    for name, unset in _MUON_ONLY.items():
        if optimizer != "muon" and settings[name] != unset:
            text = "null" if unset is None else str(unset).lower()
            raise UsageError(
                f"model.{name} goes only with model.optimizer muon: leave it out, or set --model.{name} {text}"
            )
    if settings["schedule_every"] not in ("step", "epoch"):
        raise UsageError(f"model.schedule_every must be step or epoch, not {settings['schedule_every']!r}")
    if settings["schedule_every"] == "epoch" and (settings["warmup_epochs"] or settings["schedule"] == "one_cycle"):
        raise UsageError("a warm-up by the epoch would train the first one at final_lr: use model.schedule_every step")


def build_optimizer(
    net: nn.Module,
    optimizer: str,
    lr: float,
    *,
    precision: str = "bf16-mixed",
    capturable: bool = False,
    **settings: Any,
) -> Optimizer:
    """The optimizer over all trainable parameters of `net`, which is where it will be trained.

    sgd and adamw do a step in one kernel, on CPUs too: only so do they heed `found_inf`, as Muon does by itself.

    Args:
        net: the net.
        optimizer: one of OPTIMIZERS, or the import path of a torch optimizer, called with the groups and `lr`.
        lr: the highest rate.
        precision: the Trainer's; without bf16 in it Muon's products are of float32 on a CPU, which may compute bf16 slowly.
        capturable: keep each group's rate in a 0-dim float32 tensor beside the parameters, where a captured step reads it anew.
        **settings: as of `parameter_groups`.

    Raises UsageError for an optimizer by import path that is none, or would not heed a setting.
    """
    groups = parameter_groups(net, optimizer, lr, **settings)
    first = groups[0]["params"][0]
    if capturable:
        for group in groups:
            group["lr"] = first.new_tensor(group["lr"], dtype=torch.float32)
    built: Optimizer
    if optimizer == "muon":
        products = "float32" if first.device.type == "cpu" and "bf16" not in precision else "bfloat16"
        built = Muon(groups, lr, steps=3, products=products, branches=capturable)
    elif optimizer == "adamw":
        built = AdamW(groups, lr, fused=True, capturable=capturable)
    elif optimizer == "sgd":
        built = SGD(groups, lr, fused=True)
        for group in built.param_groups:
            if group[
                "momentum"
            ]:  # at 0, which counts as none; torch's own buffers stay unwritten where `found_inf` skips a first step
                for parameter in group["params"]:
                    built.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    elif capturable:
        raise UsageError(f"a step of {optimizer} cannot be captured: add --model.capture false")
    else:
        built = import_callable(optimizer)(groups, lr=lr)
        if not isinstance(built, Optimizer):
            raise UsageError(f"{optimizer} must return a torch.optim.Optimizer, not a {type(built).__name__}")
        for setting in ("momentum", "nesterov", "weight_decay"):
            if settings.get(setting) and setting not in built.defaults:
                raise UsageError(f"{optimizer} takes no {setting}: leave model.{setting} out, or set it to 0")
    # A fused step can unscale gradients itself, too late for clipping: let Lightning's plugin for mixed precision do so.
    built._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    _keep_machine_settings(built)
    return built


def configure_optimizers(net: nn.Module, settings: Mapping[str, Any], trainer: Any) -> Any:
    """Return what a LightningModule's `configure_optimizers` returns: the optimizer and, unless rates are constant, its schedule.

    Raises UsageError for a schedule of a training without an end.
    """
    captures = can_capture(trainer, settings["capture"])
    groups = {name: settings[name] for name in GROUP_SETTINGS}
    optimizer = build_optimizer(net, precision=str(trainer.precision), capturable=captures, **groups)
    if settings["schedule"] == "constant" and not settings["warmup_epochs"] and settings["whiten_epochs"] is None:
        return optimizer
    trainer.fit_loop.setup_data()  # Lightning's estimate leaves it out if there is no limit of epochs
    steps = trainer.estimated_stepping_batches
    if steps == math.inf:
        raise UsageError(
            "a schedule must know its end: set --epochs or --trainer.max_steps, or --model.schedule constant"
        )
    steps_per_epoch = max(1, -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches))
    schedule = schedule_from(optimizer, settings, int(steps), steps_per_epoch)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": settings["schedule_every"]}}


def _keep_machine_settings(optimizer: Optimizer) -> None:
    """Makes state dicts independent of the machine: with plain rates, and without a say in how a step is computed."""
    kept = [{name: group[name] for name in MACHINE_SETTINGS if name in group} for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]

    def plain_rates(optimizer: Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])

    def own_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = state["param_groups"]
        if len(groups) != len(kept):
            return state  # torch says what is wrong
        return {**state, "param_groups": [{**group, **own} for group, own in zip(groups, kept, strict=True)]}

    def rates_in_place(optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):
                group["lr"] = rate.fill_(group["lr"])

    optimizer.register_state_dict_post_hook(plain_rates)
    optimizer.register_load_state_dict_pre_hook(own_settings)
    optimizer.register_load_state_dict_post_hook(rates_in_place)
