"""Rows of the training curves: training loss and accuracy, learning rate, norm of the weights. All must be finite."""

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
from cifar_lit.data.image_set import Batch
from cifar_lit.training.loop import gather_rows


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
    """Loss and accuracy of the steps of one fit, logged as rows.

    Sums stay on the device. Reading them waits for an accelerator, which is idle until the next step.

    Attributes:
        step: step of the last row.
        epoch: loss, hits and images of all devices in the rows of this epoch.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model  # an ImageClassifier, which imports this module
        self._loss = torch.zeros((), device=device)  # sum over the images since the last row
        self._hits = torch.zeros((), device=device)
        self._images = 0
        self._has_steps = False  # since the last row; equal on all devices, although one may have no images
        self.step = 0
        self.epoch = [0.0, 0.0, 0.0]

    def add(self, loss: Tensor, logits: Tensor, batch: Batch) -> None:
        """Add a step: the mean loss of a batch and its logits (B, classes)."""
        self._has_steps = True
        if batch.loss_weight:
            self._loss.add_(loss.detach(), alpha=len(batch.labels))
            self._hits.add_(self._model.task.hits(logits, batch.labels).sum())
            self._images += len(batch.labels)

    def epoch_means(self) -> dict[str, float]:
        """Return the mean training loss and accuracy of the epoch so far over all devices.

        It is empty without images: nothing was trained, or a subclass has a `training_step` of its own.
        """
        loss, hits, images = self.epoch
        return {"train/loss": loss / images, "train/accuracy": hits / images} if images else {}

    @property
    def _is_due(self) -> bool:
        every: int = self._model.trainer.log_every_n_steps
        return every > 0 and self._model.global_step - self.step >= every

    def after_step(self) -> dict[str, float]:
        """Log a row every `log_every_n_steps` steps, at the end of an epoch and at the end of the training.

        Returns its loss and accuracy for the progress bar; an empty dict without a row.
        """
        loop = self._model.trainer.fit_loop.epoch_loop
        if self._has_steps and (self._is_due or loop.batch_progress.is_last_batch or loop.done):
            return self._log()
        return {}

    def before_checkpoint(self) -> None:
        """Log the row of this step if it is due, because callbacks save before `after_step`."""
        if self._has_steps and self._is_due:
            self._log()

    def _log(self) -> dict[str, float]:
        """Log a row and start the next. Collective: every rank must call this."""
        model, trainer = self._model, self._model.trainer
        loss, hits, images = sums = self._gathered_sums().sum(0).tolist()
        self.epoch = [total + new for total, new in zip(self.epoch, sums, strict=True)]
        means = {"train/loss": loss / images, "train/accuracy": hits / images}
        values = {**means, "lr": float(logged_group(trainer.optimizers[0])["lr"])}  # type: ignore[arg-type]
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            values["weight_norm"] = float(get_total_norm([each.detach() for each in model.net.parameters()]))
        self.step = model.global_step
        log_values(trainer, values, model.current_epoch, self.step)
        self._loss.zero_()
        self._hits.zero_()
        self._images = 0
        self._has_steps = False
        return means

    def state_dict(self) -> dict[str, object]:
        """Return the sums of all devices for a checkpoint. Collective: every rank must call this.

        Raises NotFiniteLoss if a loss was not finite.
        """
        return {"device_sums": self._gathered_sums().tolist(), "epoch_sums": [*self.epoch], "logged_step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of this device; on another number of devices, the first continues with those of all."""
        sums = state["device_sums"]
        trainer = self._model.trainer
        if len(sums) != trainer.world_size:
            sums = [[sum(column) for column in zip(*sums, strict=True)]]
        if trainer.global_rank < len(sums):
            loss, hits, images = sums[trainer.global_rank]
            self._loss.fill_(loss)
            self._hits.fill_(hits)
            self._images = int(images)
        self._has_steps = any(images for _, _, images in sums)
        self.epoch = state["epoch_sums"]
        self.step = state["logged_step"]

    def _gathered_sums(self) -> Tensor:
        """Return loss, hits and images of each device since the last row, float32 (devices, 3) on the CPU."""
        model = self._model
        own = torch.stack((self._loss, self._hits, self._hits.new_full((), self._images)))
        sums = gather_rows(model.trainer, model, own).cpu()
        if not math.isfinite(sums.sum()):
            steps = f"steps {self.step} to {model.global_step} of epoch {model.current_epoch}"
            raise NotFiniteLoss(f"a loss is not finite in {steps}")
        return sums
