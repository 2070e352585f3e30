"""Where the training loop is: what follows the current batch."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl


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
