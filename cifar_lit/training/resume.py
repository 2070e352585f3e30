"""Checks of a resumed training, and settings that override its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.optimizers import GROUP_SETTINGS, parameter_groups


def check_resumable(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise UsageError if a checkpoint with the hyper-parameters `saved` cannot be resumed with `settings`."""
    for name in ("net", "width", "net_options", "input_shape", "num_classes"):
        if (saved.get(name, settings[name]) or None) != (settings[name] or None):
            fault = f"this run's {name} is {saved[name]}, not {settings[name]}"
            raise UsageError(f"{fault}: keep the settings of net and images, or start a new run")
    if saved and _schedule_kind(saved) != _schedule_kind(settings):
        names = "model.schedule, schedule_every, warmup_epochs, frozen and input_lr"
        raise UsageError(f"a resumed run cannot change its schedule or its groups of layers: keep {names}")


def _schedule_kind(settings: Mapping[str, Any]) -> tuple[object, ...]:
    """Return values that must be unchanged on resume, because the state of a schedule depends on them."""
    constant = settings.get("schedule", "constant") == "constant"
    timed = not constant or settings.get("warmup_epochs") or settings.get("whiten_epochs") is not None
    every, frozen = settings.get("schedule_every", "step"), settings.get("frozen", 0.0)
    return bool(timed), every, frozen, settings.get("input_lr") is None


def override_optimizer_settings(checkpoint: dict[str, Any], settings: Mapping[str, Any], net: nn.Module) -> None:
    """Replace rates, momentum and decay in a checkpoint by those of `settings`; keep buffers and step counts.

    Raises UsageError for another optimizer, which cannot use these buffers.
    """
    saved = checkpoint.get("hyper_parameters", {})
    if not saved.get("lr"):
        return
    if saved.get("optimizer") != settings["optimizer"]:
        fault = f"this run was trained with {saved.get('optimizer')} and cannot resume with {settings['optimizer']}"
        raise UsageError(f"{fault}: keep model.optimizer, or start a new run")
    old, new = (
        parameter_groups(net, **{name: values[name] for name in GROUP_SETTINGS if name in values})
        for values in (saved, settings)
    )
    scales = [new_group["lr"] / old_group["lr"] for old_group, new_group in zip(old, new, strict=True)]
    for optimizer in checkpoint.get("optimizer_states", []):
        for group, changed, scale in zip(optimizer["param_groups"], new, scales, strict=False):
            for rate in ("lr", "initial_lr"):
                if rate in group:
                    group[rate] *= scale
            group.update({name: value for name, value in changed.items() if name not in ("params", "lr")})
    for schedule in checkpoint.get("lr_schedulers", []):
        for rates in ("base_lrs", "_last_lr"):
            if rates in schedule:
                schedule[rates] = [rate * scale for rate, scale in zip(schedule[rates], scales, strict=False)]


# State tensors of torch's optimizers with the shape of their parameter.
_SHAPED_STATE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def check_restored_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise Failure for restored state of another shape than its parameter: fused kernels would write out of bounds."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_shaped = name in _SHAPED_STATE
            if value is None or (not is_shaped and (name != "step" or isinstance(value, int | float))):
                continue
            if not isinstance(value, Tensor) or value.shape != (parameter.shape if is_shaped else torch.Size()):
                fault = f"the checkpoint does not fit this run: its optimizer has another {name}"
                raise Failure(f"{fault}. Use another checkpoint.")
            if is_shaped and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter).copy_(value)
