"""Rows of the training curves: measured on the device, logged when their values have reached the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import _BLOCKING_DEVICE_TYPES
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from cifar_lit.training.checks import NotFiniteLoss
from cifar_lit.training.collectives import gather_rows
from cifar_lit.training.loop_position import is_last_epoch, validates_next
from cifar_lit.training.metrics import FINITE_BATCHES, NON_FINITE, RunningMetrics


class Row(NamedTuple):
    """A measured row."""

    start: int  # step of the previous row
    step: int
    epoch: int
    sums: Tensor  # per device since the previous row, float32 (devices, 5); see `RunningMetrics.sums`
    lr: Tensor | float
    weight_norm: Tensor | None  # at the end of an epoch, None in other rows
    copied: Any  # event after the copies to the host, None if they are complete


def copy_to_host(value: object, late: bool) -> Any:
    """Return a copy of a tensor on the host, and other values unchanged. late: return before the copy is complete."""
    # A non-blocking copy from a GPU goes to page-locked memory. A copy to pageable memory would block the host.
    if isinstance(value, Tensor):
        return value.to("cpu", non_blocking=late, copy=True)
    return value


def record_event(device: torch.device) -> object:
    """Return an event that follows all work queued on an accelerator."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def logged_group(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the parameter group whose rate is logged: the first, or if that is split by depth, its last layers."""
    first: dict[str, object] = optimizer.param_groups[0]
    if "role" not in first:  # an optimizer of another package
        return first
    return [group for group in optimizer.param_groups if group.get("role") == first["role"]][-1]


def log_values(trainer: pl.Trainer, values: Mapping[str, float], epoch: int, step: int) -> None:
    """Write values to the loggers. `LightningModule.log` takes longer than a step of a small net."""
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": epoch}, step)


class _Measured(Protocol):
    """What rows read of an `ImageClassifier`, which imports them."""

    net: nn.Module
    running: RunningMetrics

    @property
    def trainer(self) -> pl.Trainer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def global_step(self) -> int: ...
    @property
    def current_epoch(self) -> int: ...


class TrainingRows:
    """Log the rows of one fit: training loss and accuracy since the previous row, learning rate, norm of the weights.

    Attributes:
        step: step of the last measured row.
        loss: training loss of the last logged row, equal on all devices; NaN before the first one.
        late: measure rows without waiting for the device; see `LateRows`.
    """

    def __init__(self, model: _Measured) -> None:
        self._model = model
        self.step, self.loss = 0, math.nan
        self.late = False
        self._row: Row | None = None  # measured, but not logged
        self._actions: list[Callable[[], None]] = []  # called after this row is logged
        self._means: dict[str, Tensor] = {}  # for the progress bar

    @property
    def pending(self) -> bool:
        """Whether a row is measured, but not logged."""
        return self._row is not None

    @property
    def _is_due(self) -> bool:
        every: int = self._model.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and self._model.global_step - self.step >= every

    def after_step(self) -> dict[str, Tensor]:
        """Measure a row every `log_every_n_steps` steps, at the end of an epoch and at the end of the training.

        Returns loss and accuracy for the progress bar if a row was logged since the last call, else an empty dict.
        """
        loop = self._model.trainer.fit_loop.epoch_loop
        if self._model.running.batches and (self._is_due or loop.batch_progress.is_last_batch or loop.done):
            self._measure()
        if self._row and (self._row.copied is None or self._row.copied.query()):
            self.log()
        means, self._means = self._means, {}
        return means

    def before_checkpoint(self) -> None:
        """Log the row of this step if it is due, because callbacks save before `after_step`."""
        if self._model.running.batches and self._is_due:
            self._measure()
        self.log()

    def when_logged(self, action: Callable[[], None]) -> None:
        """Call `action` after the last measured row is logged: now, unless it is pending."""
        if self._row:
            self._actions.append(action)
        else:
            action()

    def _measure(self) -> None:
        """Copy the values of a row to the host, and start the next row. Collective: every rank must call this."""
        self.log()
        model, trainer = self._model, self._model.trainer
        loop = trainer.fit_loop.epoch_loop
        training_ends = loop.done and is_last_epoch(trainer)
        must_wait = validates_next(trainer) or training_ends
        late = self.late and not must_wait
        norm = None
        if loop.batch_progress.is_last_batch:
            norm = get_total_norm([parameter.detach() for parameter in model.net.parameters()])
        values = (self._gathered_sums(), logged_group(trainer.optimizers[0])["lr"], norm)
        sums, rate, norm = (copy_to_host(value, late) for value in values)
        copied = record_event(model.device) if late else None
        self._row = Row(self.step, model.global_step, model.current_epoch, sums, rate, norm, copied)
        self.step = model.global_step
        model.running.start_row()

    def log(self) -> None:
        """Wait for the measured row and log it, unless it is logged. Raise NotFiniteLoss if a loss is not finite."""
        row, self._row = self._row, None
        actions, self._actions = self._actions, []
        if row is None:
            return
        if row.copied is not None:
            row.copied.synchronize()
        model = self._model
        self._check(row.sums, row.start, row.epoch)
        loss, hits, images = sums = row.sums[:, :3].sum(0).tolist()
        model.running.epoch = [total + new for total, new in zip(model.running.epoch, sums, strict=True)]
        self.loss = loss / images
        rate = float(row.lr)
        means = {"train/loss": self.loss, "train/accuracy": hits / images}
        norm = {} if row.weight_norm is None else {"weight_norm": float(row.weight_norm)}
        log_values(model.trainer, {**means, "lr": rate, **norm}, row.epoch, row.step)
        self._means = {name: torch.tensor(value) for name, value in means.items()}  # Lightning would use the device
        for action in actions:
            action()

    def unlogged_sums(self) -> list[list[float]]:
        """Return loss, hits and images of each device since the last row, for a checkpoint.

        Collective: every rank must call this. Raises NotFiniteLoss if a loss is not finite.
        """
        sums = self._gathered_sums().cpu()
        self._check(sums, self.step, self._model.current_epoch)
        return sums[:, :3].tolist()

    def _gathered_sums(self) -> Tensor:
        return gather_rows(self._model.trainer, self._model, self._model.running.sums())  # type: ignore[arg-type]

    def _check(self, sums: Tensor, start: int, epoch: int) -> None:
        if sums[:, NON_FINITE].any():
            step = start + int(sums[:, FINITE_BATCHES].min()) // self._model.trainer.accumulate_grad_batches
            raise NotFiniteLoss(f"the loss is not finite at step {step} of epoch {epoch}")


# ---- accelerators


def reads_late(trainer: pl.Trainer, model: pl.LightningModule) -> bool:
    """Return whether rows may be logged late: on one accelerator, if no callback reads the training loss at its step.

    Callbacks and modules of other packages may read `trainer.callback_metrics` at the end of an epoch.
    `_BLOCKING_DEVICE_TYPES` lists the devices without reliable non-blocking copies.
    """
    if trainer.strategy.root_device.type in _BLOCKING_DEVICE_TYPES or trainer.world_size > 1:
        return False
    for each in (model, *trainer.callbacks):  # type: ignore[attr-defined]
        is_foreign = not type(each).__module__.startswith(("cifar_lit.", "lightning."))
        monitor = getattr(each, "monitor", None) or ""
        if is_foreign or isinstance(each, LambdaCallback) or monitor.startswith("train/"):
            return False
    return True


class LateRows(Callback):
    """Log the rows of a fit without waiting for the device, if `reads_late` allows it.

    If the host waited, the device would be idle until the host has queued the next steps. A row is logged after a later
    step, when its values have arrived, and at the latest before the next row, a validation, a checkpoint and the end.
    """

    def __init__(self) -> None:
        self._rows: TrainingRows | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide for this fit."""
        self._rows = None
        if reads_late(trainer, pl_module):
            self._rows = cast("TrainingRows", pl_module.rows)
            self._rows.late = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the pending row before the scores of the validation."""
        if self._rows:
            self._rows.log()

    on_train_end = on_validation_start

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Log the pending row, if its values can be read. A further error must not replace the first."""
        if self._rows:
            with suppress(Exception):
                self._rows.log()
