"""Checks of what a checkpoint holds: values that are not finite, and the state of a resumed training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from cifar_lit.base.settings import plain_settings


class NotFiniteLoss(RuntimeError):
    """The training loss became NaN or infinite; raised before it reaches a checkpoint."""


def check_finite(model: pl.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Raise NotFiniteLoss if a weight, its average, norm statistics or momenta in a checkpoint are not finite.

    This happens if the last step overflows a weight although its loss was finite. Other buffers may be infinite, such
    as masks.
    """
    parameters = dict(model.named_parameters())
    tensors: list[tuple[str, Tensor]] = []
    for state in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
        for name, tensor in state.items():
            if name in parameters or "running_" in name:
                tensors.append((name, tensor))
    for optimizer in checkpoint.get("optimizer_states", ()):
        for index, state in optimizer["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors.append((f"{index}'s {name}", value))
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            where = f"at step {model.global_step} of epoch {model.current_epoch}"
            raise NotFiniteLoss(f"the weight {name.removeprefix('net.')} is no longer finite {where}")


# Settings of the Trainer that change what is computed.
TRAINER_SETTINGS = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "overfit_batches",
)  # fmt: skip


def training_settings(hparams: Mapping[str, object], trainer: pl.Trainer) -> dict[str, object]:
    """Return the settings of an ImageClassifier and its Trainer by dotted name, as `changed_settings` compares them."""
    limits = {name: getattr(trainer, name) for name in TRAINER_SETTINGS}
    return {**plain_settings("model", hparams), **plain_settings("trainer", limits)}


def align_restored_state(optimizer: torch.optim.Optimizer) -> None:
    """Lay restored state out like its parameter: fused kernels would read and write out of bounds."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name in ("momentum_buffer", "exp_avg", "exp_avg_sq") and value is not None:
                state[name] = torch.empty_like(parameter).copy_(value)
