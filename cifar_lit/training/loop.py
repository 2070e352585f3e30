"""Where the training loop is, and tensors that its ranks exchange."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def within_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the epoch continues after this batch, and no accumulated gradients would be lost."""
    return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not trainer.fit_loop._should_accumulate()


def steps_per_epoch(trainer: pl.Trainer) -> int:
    """Return the optimizer steps of an epoch, at least 1. The loaders must be set up."""
    return max(1, math.ceil(int(trainer.num_training_batches) / trainer.accumulate_grad_batches))


def is_last_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the training ends with this epoch, unless a minimum number of epochs or steps prolongs it."""
    ends = trainer.current_epoch + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps
    return ends or trainer.should_stop


def validates_next(trainer: pl.Trainer) -> bool:
    """Return whether a validation follows this batch; the answer is the same on every rank.

    A checkpoint written before that validation would skip it on resume.
    """
    loop: Any = trainer.fit_loop
    return loop.trainer._val_check_time_interval is None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def broadcast_from_first(trainer: pl.Trainer, *tensors: Tensor) -> None:
    """Copy tensors of the first rank to all others, in place. Collective: every rank must call this.

    `strategy.broadcast` would pickle them. Every rank would unpickle a tensor to the first rank's device.
    """
    if trainer.world_size > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), 0)


def gather_rows(trainer: pl.Trainer, pl_module: pl.LightningModule, row: Tensor) -> Tensor:
    """Return the rows (n,) of all devices as (devices, n). Collective: every rank must call this.

    Not Lightning's `all_gather`, which calls a function that torch 2.15 deprecates.
    """
    rows = torch.zeros((trainer.world_size, len(row)), dtype=row.dtype, device=pl_module.device)
    rows[trainer.global_rank] = row
    return trainer.strategy.reduce(rows, reduce_op="sum")
