"""Numbers that stay honest: a training that diverges is told once, and weights that are not finite reach no checkpoint."""

from __future__ import annotations

import math
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn

from cifar_lit.training.step import NotFiniteLoss

FAR_ABOVE = 3.0  # times the loss of the start; spikes of a warm-up stay below twice that


class Divergence(Callback):
    """Says once when the logged training loss is far above that of the start.

    The start is the first logged loss, or that of guessing, log(classes), where this is higher: a resumed run has a low one.
    """

    takes_chunks = True

    def __init__(self) -> None:
        self._start: float | None = None
        self._told = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at the last logged loss, which all devices share."""
        loss = pl_module.progress.get("loss")  # type: ignore[union-attr, operator]
        if self._told or loss is None:
            return
        if self._start is None:
            self._start = max(loss, math.log(pl_module.hparams["num_classes"]))
        if loss > FAR_ABOVE * self._start:
            self._told = True
            if trainer.is_global_zero:
                told = f"the training loss is {loss:.4g} at step {trainer.global_step}, far above its start ({self._start:.4g})"
                print(f"{told}: the training diverges; lower --lr or raise --model.warmup_epochs", file=sys.stderr, flush=True)


def refuse_weights_that_are_not_finite(net: nn.Module, step: int, epoch: int) -> None:
    """Raises NotFiniteLoss where the last update, after a loss that was finite, has left weights that are not."""
    for name, parameter in net.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise NotFiniteLoss(f"the weight {name} is no longer finite at step {step} of epoch {epoch}")
