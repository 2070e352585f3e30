"""Rows of the training curves: training loss and accuracy, learning rate, norm of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from torch import Tensor
from torch.nn.utils import get_total_norm

from cifar_lit.base.errors import first_line
from cifar_lit.base.text import note
from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.collectives import gather_rows


def logged_group(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the parameter group whose rate is logged: the first, or if that is split by depth, its last layers."""
    first: dict[str, object] = optimizer.param_groups[0]
    if "role" not in first:  # an optimizer of another package
        return first
    return [group for group in optimizer.param_groups if group.get("role") == first["role"]][-1]


def log_values(trainer: pl.Trainer, values: Mapping[str, float], epoch: int, step: int) -> None:
    """Write values to the loggers. `LightningModule.log` takes longer than a step of a small net."""
    for logger in [*trainer.loggers]:
        try:
            logger.log_metrics({**values, "epoch": epoch}, step)
        except Exception as error:
            if not isinstance(logger, (WandbLogger, MLFlowLogger)):
                raise
            note(f"{type(logger).__name__} failed ({first_line(error)}): the training continues without it")
            trainer.loggers.remove(logger)


class TrainingRows:
    """Log the rows of one fit. Reading their values waits for an accelerator, which is idle until the next step.

    Attributes:
        step: step of the last row.
    """

    def __init__(self, model: Any) -> None:
        self._model = model  # an ImageClassifier, which imports this module
        self.step = 0

    @property
    def _is_due(self) -> bool:
        every: int = self._model.trainer.log_every_n_steps
        return every > 0 and self._model.global_step - self.step >= every

    def after_step(self) -> dict[str, float]:
        """Log a row every `log_every_n_steps` steps, at the end of an epoch and at the end of the training.

        Returns its loss and accuracy for the progress bar; an empty dict without a row.
        """
        loop = self._model.trainer.fit_loop.epoch_loop
        if self._model.running.batches and (self._is_due or loop.batch_progress.is_last_batch or loop.done):
            return self._log()
        return {}

    def before_checkpoint(self) -> None:
        """Log the row of this step if it is due, because callbacks save before `after_step`."""
        if self._model.running.batches and self._is_due:
            self._log()

    def _log(self) -> dict[str, float]:
        """Log a row and start the next. Collective: every rank must call this."""
        model, trainer = self._model, self._model.trainer
        loss, hits, images = sums = self._gathered_sums().sum(0).tolist()
        model.running.epoch = [total + new for total, new in zip(model.running.epoch, sums, strict=True)]
        means = {"train/loss": loss / images, "train/accuracy": hits / images}
        values = {**means, "lr": float(logged_group(trainer.optimizers[0])["lr"])}  # type: ignore[arg-type]
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            values["weight_norm"] = float(get_total_norm([each.detach() for each in model.net.parameters()]))
        self.step = model.global_step
        log_values(trainer, values, model.current_epoch, self.step)
        model.running.start_row()
        return means

    def unlogged_sums(self) -> list[list[float]]:
        """Return loss, hits and images of each device since the last row, for a checkpoint.

        Collective: every rank must call this. Raises NotFiniteLoss if a loss was not finite.
        """
        return self._gathered_sums().tolist()

    def _gathered_sums(self) -> Tensor:
        model = self._model
        sums = gather_rows(model.trainer, model, model.running.sums()).cpu()
        if not math.isfinite(sums.sum()):
            steps = f"steps {self.step} to {model.global_step} of epoch {model.current_epoch}"
            raise NotFiniteLoss(f"a loss is not finite in {steps}")
        return sums
