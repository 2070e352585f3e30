"""Checks of a resumed training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cifar_lit.errors import Failure
from cifar_lit.settings import plain_settings

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Settings of the Trainer that change what is computed.
TRAINER_SETTINGS = (
    "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "limit_train_batches", "overfit_batches",
)  # fmt: skip


def training_settings(hparams: Mapping[str, object], trainer: Trainer) -> dict[str, object]:
    """Return the settings of an ImageClassifier and its Trainer by dotted name, as `changed_settings` compares them."""
    limits = {name: getattr(trainer, name) for name in TRAINER_SETTINGS}
    return {**plain_settings("model", hparams), **plain_settings("trainer", limits)}


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
