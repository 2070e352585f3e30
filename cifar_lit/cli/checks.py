"""Settings that no type refuses and no training can be made with."""

from __future__ import annotations

import re
from typing import Any

from cifar_lit.errors import UsageError
from cifar_lit.models.registry import takes_any_size
from cifar_lit.training.callbacks import parse_interval


def check_settings(settings: Any) -> None:
    """Raises UsageError for what makes no sense in a training command's settings, before data are touched."""
    if settings.checkpoint_every is not None:
        parse_interval(settings.checkpoint_every)
    strategy = str(settings.trainer.strategy)
    if sharded := re.search(r"fsdp|deepspeed|model_?parallel", strategy, re.IGNORECASE):
        reason = "shares tensors out, which checkpoints and Muon need whole: use --trainer.strategy ddp"
        raise UsageError(f"--trainer.strategy {sharded[0]} {reason}")
    if any(way in strategy for way in ("_spawn", "_fork", "_notebook")):
        raise UsageError(f"--trainer.strategy {strategy} is for scripts and notebooks that start processes themselves: use ddp")
    epochs, data = settings.trainer.max_epochs, settings.data
    numbers = (("--epochs", epochs), ("--batch-size", data.batch_size), ("data.eval_batch_size", data.eval_batch_size))
    for flag, number in numbers:
        if number is not None and number < 1:
            raise UsageError(f"{flag} must be at least 1, not {number}")
    if data.resolutions and not takes_any_size(settings.model.net):
        raise UsageError(f"{settings.model.net} takes images of one size: leave data.resolutions out")
