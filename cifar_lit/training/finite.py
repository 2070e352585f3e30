"""Losses and weights that are no longer finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


class NotFiniteLoss(RuntimeError):
    """The training loss became NaN or infinite; raised before it reaches a checkpoint."""


def check_finite(model: pl.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Raise NotFiniteLoss if a weight, its average, norm statistics or momenta in a checkpoint are not finite.

    This happens if the last step overflows a weight although its loss was finite. Other buffers may be infinite, such
    as masks.
    """
    parameters = {name for name, _ in model.named_parameters()}
    tensors: list[tuple[str, Any]] = []
    for state in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
        tensors += [pair for pair in state.items() if pair[0] in parameters or "running_" in pair[0]]
    for optimizer in checkpoint.get("optimizer_states", ()):
        for index, state in optimizer["state"].items():
            tensors += [(f"{index}'s {name}", value) for name, value in state.items() if isinstance(value, Tensor)]
    for name, tensor in tensors:
        if not bool(tensor.isfinite().all()):
            where = f"at step {model.global_step} of epoch {model.current_epoch}"
            raise NotFiniteLoss(f"the weight {name.removeprefix('net.')} is no longer finite {where}")
