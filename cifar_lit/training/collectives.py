"""Collective calls for callbacks. None of them pickles tensors, or waits for the training device in every step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def broadcast_from_first(trainer: pl.Trainer, *tensors: Tensor) -> None:
    """Copy tensors of the first rank to all others, in place. Collective: every rank must call this.

    `strategy.broadcast` would pickle them. Every rank would unpickle a tensor to the first rank's device.
    """
    if trainer.world_size > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), 0)


class Agreement:
    """The maximum of an integer over all ranks, exchanged between the CPUs while the devices compute.

    The exchange uses its own process group (gloo). A collective call on the training device would queue behind
    the step, and reading its result would wait for the step. All methods are collective: every rank must call them.
    """

    def __init__(self) -> None:
        self._group: Any = None  # None for a single rank
        self._number = torch.zeros((), dtype=torch.int64)
        self._work: torch.distributed.Work | None = None

    def connect(self, trainer: pl.Trainer) -> None:
        """Connect the ranks. Call this in `setup`, before the clock starts."""
        if trainer.world_size > 1 and self._group is None:
            # timeout=None selects torch's default timeout.
            timeout = getattr(trainer.strategy, "_timeout", None)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def start(self, number: int) -> None:
        """Send this rank's number, without waiting for the others."""
        self._number = torch.tensor(number)
        if self._group is not None:
            highest = torch.distributed.ReduceOp.MAX
            self._work = torch.distributed.all_reduce(self._number, highest, group=self._group, async_op=True)

    def result(self) -> int:
        """Return the highest number sent. Wait until every rank has sent its number."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._number)


def gather_rows(trainer: pl.Trainer, pl_module: pl.LightningModule, row: Tensor) -> Tensor:
    """Return the rows (n,) of all devices as (devices, n). Collective: every rank must call this.

    Not Lightning's `all_gather`, which calls a function that torch 2.15 deprecates.
    """
    rows = torch.zeros((trainer.world_size, len(row)), dtype=row.dtype, device=pl_module.device)
    rows[trainer.global_rank] = row
    return trainer.strategy.reduce(rows, reduce_op="sum")
