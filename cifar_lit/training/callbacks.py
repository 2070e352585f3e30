"""Callbacks around the training steps: time, random state, progress, divergence."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import rich
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.profilers import PassThroughProfiler
from rich.progress import BarColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from cifar_lit.text import counted, note, say

# ---- time


class Clock(Callback):
    """Measures the fit, also a resumed one: `seconds` in all, `training_seconds` without validation, and `images` trained on."""

    def __init__(self) -> None:
        self.images = 0
        self._total, self._validation = 0.0, 0.0
        self._started: float | None = None
        self._validation_started = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the fit so far."""
        return self._total + (time.perf_counter() - self._started if self._started is not None else 0.0)

    @property
    def training_seconds(self) -> float:
        """Wall time of the fit so far without its validations."""
        return self.seconds - self._validation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock; set-up is over."""
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the images of the global batch, of which this device's part has `loss_weight / world_size`."""
        if batch.loss_weight:
            self.images += round(len(batch.labels) * trainer.world_size / batch.loss_weight)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation begins."""
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation ends."""
        if self._started is not None:
            self._validation += time.perf_counter() - self._validation_started

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self._total, self._started = self.seconds, None

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"seconds": self.seconds, "validation": self._validation, "images": self.images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From checkpoints."""
        self._total, self._validation, self.images = state["seconds"], state["validation"], state["images"]


class NoProfiler(PassThroughProfiler):
    """Lightning's own without a generator for each of some fifty calls a step: a tenth of what the Trainer adds to a step."""

    _NOTHING: AbstractContextManager[None] = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        """One context manager for all."""
        return self._NOTHING


# ---- what a resumed run needs to go on as if nothing had been


class RandomState(Callback):
    """Saves every device's random state (dropout draws from it), so that a resumed run draws what it would have drawn.

    On another number of devices, each starts from a seed computed from the saved states and its rank. Dropout masks then
    differ from those of an undisturbed run, but are reproducible. A line says what batch norm changes there.
    """

    def __init__(self) -> None:
        self._restored: list[Tensor] | None = None  # uint8 (devices, n) of the CPU, and of the accelerator

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collects the states of all devices."""
        states = [torch.get_rng_state()]
        if pl_module.device.type != "cpu":
            states.append(torch.get_device_module(pl_module.device).get_rng_state())
        checkpoint["random_state"] = [gather_rows(trainer, pl_module, state).cpu() for state in states]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the states until set-up, which draws numbers too, is over."""
        self._restored = checkpoint.get("random_state")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts this device's state in place or, where the checkpoint knew another number of devices, a new one."""
        if self._restored is None:
            return
        if len(self._restored[0]) != trainer.world_size:
            saved = b"".join(states.numpy().tobytes() for states in self._restored)
            digest = hashlib.sha256(trainer.global_rank.to_bytes(8, "big") + saved).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big"))
            if trainer.is_global_zero and any(
                isinstance(module, _BatchNorm) and module.training and not isinstance(module, SyncBatchNorm)
                for module in pl_module.modules()
            ):
                devices = f"{len(self._restored[0])} → {trainer.world_size} devices"
                remedy = " (GPUs: --trainer.sync_batchnorm true in all parts of a run takes them over the whole batch)"
                say(
                    f"{devices}: batch norm takes its statistics on each device, so the results differ slightly{remedy}"
                )
            return
        # cloned, as torch reads a state through a pointer that must be aligned: a row in the middle crashes it
        own = [states[trainer.global_rank].clone() for states in self._restored]
        torch.set_rng_state(own[0])
        if len(own) > 1 and pl_module.device.type != "cpu":
            torch.get_device_module(pl_module.device).set_rng_state(own[1])


def gather_rows(trainer: pl.Trainer, pl_module: pl.LightningModule, row: Tensor) -> Tensor:
    """The rows (n,) of all devices as (devices, n), on each; Lightning's `all_gather` warns of what torch 2.15 deprecates."""
    rows = torch.zeros((trainer.world_size, len(row)), dtype=row.dtype, device=pl_module.device)
    rows[trainer.global_rank] = row
    return trainer.strategy.reduce(rows, reduce_op="sum")


# ---- what a training shows while it runs


class LiveBar(RichProgressBar):
    """Lightning's rich bar on one line, with the training loss and accuracy logged last. It never waits for the device.

    The bar disappears at the end: the epoch lines above it stay.
    """

    WIDE = 110  # columns: room for the elapsed time, the speed and the metrics beside the bar

    def __init__(self) -> None:
        # Two updates a second: drawing more often costs a few percent of a small net's training.
        super().__init__(refresh_rate=2, theme=RichProgressBarTheme(metrics_format=".4f"))

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Return Lightning's columns. Below `WIDE` columns, only the remaining time is shown beside the batch count."""
        columns = super().configure_columns(trainer)
        if rich.get_console().width >= self.WIDE:
            return columns
        return [*columns[:3], TimeRemainingColumn(compact=True)]

    def _init_progress(self, trainer: pl.Trainer) -> None:
        """Let the bar absorb a lack of width: rich would wrap the metrics instead."""
        super()._init_progress(trainer)
        if self.progress is None:
            return
        self.progress.live.transient = True
        for column in self.progress.columns:
            if not isinstance(column, BarColumn | str):
                column._table_column = Column(no_wrap=True)

    def _get_train_description(self, current_epoch: int) -> str:
        """Return the epoch, counted from 1 as in the epoch lines; Lightning counts from 0."""
        epochs = last_epoch(self.trainer)
        return f"epoch {current_epoch + 1}" + (f"/{epochs}" if epochs else "")

    def get_metrics(self, trainer: pl.Trainer, pl_module: Any) -> dict[str, Any]:
        """Return the training loss and accuracy logged last. The epoch lines show the validation."""
        labels = {"train/loss": "loss", "train/accuracy": "accuracy"}
        metrics = super().get_metrics(trainer, pl_module)
        return {label: metrics[name] for name, label in labels.items() if name in metrics}


def last_epoch(trainer: pl.Trainer) -> int | None:
    """Return the number of epochs that the training will have, None if it has no limit. `max_steps` may end it early."""
    epochs = getattr(trainer.datamodule, "epochs", None) or trainer.max_epochs or -1  # type: ignore[attr-defined]
    return epochs if epochs > 0 else None


class EpochLines(Callback):
    """Print one line per epoch: training and validation loss and accuracy, seconds, images per second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before = (0.0, 0.0, 0)
        self._validated = False  # since the last line

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from here, in a resumed run too."""
        self._before = (self._clock.seconds, self._clock.training_seconds, self._clock.images)
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the validation's figures in the next line only."""
        self._validated = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that the training was stopped early, and why."""
        for each in trainer.early_stopping_callbacks:
            if trainer.is_global_zero and each.stopped_epoch and each.wait_count >= each.patience:
                say(f"stopped early: {counted(each.wait_count, 'validation')} without a better {each.monitor}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Print the line."""
        if not trainer.is_global_zero:
            return
        loss, accuracy = pl_module.running.epoch_means()
        now = (self._clock.seconds, self._clock.training_seconds, self._clock.images)
        seconds, training, images = (end - start for end, start in zip(now, self._before, strict=True))
        self._before = now
        epochs = last_epoch(trainer) or "…"
        parts = [
            f"epoch {trainer.current_epoch + 1:>{len(str(epochs))}}/{epochs}",
            f"train loss {loss:.4f} acc {accuracy:.4f}",
        ]
        if self._validated and "val/loss" in (metrics := trainer.callback_metrics):
            names = {"loss": "loss", "accuracy": "acc"}
            names.setdefault(pl_module.hparams["monitor"], pl_module.hparams["monitor"])
            parts.append(
                "val " + " ".join(f"{text} {float(metrics[f'val/{name}']):.4f}" for name, text in names.items())
            )
        self._validated = False
        parts += [f"{seconds:.1f} s", f"{images / max(training, 1e-9):.0f} images/s"]
        console = rich.get_console()
        line = fitting(parts, console.width) if console.is_terminal else " · ".join(parts)
        console.print(line, highlight=False, soft_wrap=True)


def fitting(parts: list[str], width: int) -> str:
    """Join the parts of an epoch line. On a narrow terminal, drop the speed, then the seconds."""
    lines = (" · ".join(parts[: len(parts) - dropped]) for dropped in range(3))
    return next((line for line in lines if len(line) <= width), " · ".join(parts[:-2]))


# ---- divergence


class NotFiniteLoss(RuntimeError):
    """The training loss became NaN or infinite; raised before it reaches a checkpoint."""


class DivergenceWarning(Callback):
    """Says once when the logged training loss is far above that of the start, and each time that a validation's is not finite.

    The start is the first logged loss, or that of guessing, log(classes), where this is higher: a resumed run has a low one.
    """

    FAR_ABOVE = 3.0  # times the loss of the start; spikes of a warm-up stay below twice that

    def __init__(self) -> None:
        self._start = 0.0  # unknown as yet; infinite once it was said

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Looks at the last logged loss, which all devices share."""
        loss = pl_module.logged_loss
        if loss > 0 and not self._start:
            self._start = max(loss, math.log(pl_module.hparams["num_classes"]))
        if loss > self.FAR_ABOVE * self._start:
            if trainer.is_global_zero:
                where = f"the training loss is {loss:.4g} at step {trainer.global_step}, far above its start ({self._start:.4g})"
                note(f"{where}: the training diverges; lower --lr or raise --model.warmup_epochs")
            self._start = math.inf

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Says that an epoch whose validation loss is not finite cannot be the best."""
        if trainer.is_global_zero and not trainer.sanity_checking and not math.isfinite(pl_module.score.loss):
            what = f"the validation loss is not finite after step {trainer.global_step}"
            note(f"{what}: these weights do not count as the best; lower --lr if it stays so")


def check_finite(model: pl.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Raises NotFiniteLoss where a checkpoint is to hold a number that is not finite, though the last loss was.

    Such as weights that the last update of an epoch has let overflow, their average, a norm's statistics, or momenta, which
    would spoil the first step of a resumed training. Other buffers are a net's own: a mask may well be infinite.
    """
    own = {name for name, _ in model.named_parameters()}
    states = (checkpoint["state_dict"], checkpoint.get("current_model_state", {}))
    numbers = [(name.removeprefix("net."), value) for state in states for name, value in state.items()
               if name in own or "running_" in name]  # fmt: skip
    for optimizer in checkpoint.get("optimizer_states", ()):
        for place, state in optimizer["state"].items():
            numbers += [(f"{place}'s {name}", value) for name, value in state.items() if isinstance(value, Tensor)]
    for name, value in numbers:
        if not bool(value.isfinite().all()):
            where = f"at step {model.global_step} of epoch {model.current_epoch}"
            raise NotFiniteLoss(f"the weight {name} is no longer finite {where}")
