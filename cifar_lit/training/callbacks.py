"""Callbacks around the training steps: time, random state, progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import rich
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.text import counted, say
from cifar_lit.training.loop import gather_rows, is_last_epoch

if TYPE_CHECKING:
    from cifar_lit.data.image_set import Batch
    from cifar_lit.training.classifier import ImageClassifier

# ---- time


class Clock(Callback):
    """Measure the duration of a fit, including its earlier parts if it is resumed, and of the latest test.

    The fit ends with its last epoch, before the checkpoints of that epoch are written: published records have none.

    Attributes:
        images: number of images trained on.
        test_seconds: wall-clock time of the latest test, including test-time augmentation; None before the first.
    """

    def __init__(self) -> None:
        self.images = 0
        self.test_seconds: float | None = None
        self._total, self._validation = 0.0, 0.0
        self._started: float | None = None
        self._epoch_ended: float | None = None  # the latest epoch of this fit
        self._validation_started = self._test_started = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock time of the fit so far."""
        return self._total + (time.perf_counter() - self._started if self._started is not None else 0.0)

    @property
    def training_seconds(self) -> float:
        """Wall-clock time of the fit so far, without validation."""
        return self.seconds - self._validation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, after the set-up."""
        self._started, self._epoch_ended = time.perf_counter(), None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """Count the images of the global batch; this device has the fraction `loss_weight / world_size` of them."""
        if batch.loss_weight:
            self.images += round(len(batch.labels) * trainer.world_size / batch.loss_weight)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the validation."""
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock of the validation."""
        if self._started is not None:
            self._validation += time.perf_counter() - self._validation_started

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the time, before Lightning calls the checkpoint callbacks."""
        if is_last_epoch(trainer):
            wait_for_device(pl_module)
        self._epoch_ended = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock at the end of the last epoch. A fit of only the last layer (`unfreeze: false`) has none."""
        if self._started is not None:
            self._total += (time.perf_counter() if self._epoch_ended is None else self._epoch_ended) - self._started
        self._started = None

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the test, after the weights were copied to the device."""
        wait_for_device(pl_module)
        self._test_started = time.perf_counter()

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock of the test, before its results are written."""
        wait_for_device(pl_module)
        self.test_seconds = time.perf_counter() - self._test_started

    def state_dict(self) -> dict[str, object]:
        """Return the times and the number of images."""
        return {"seconds": self.seconds, "validation": self._validation, "images": self.images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the times and the number of images."""
        self._total = state["seconds"]
        self._validation = state["validation"]
        self.images = state["images"]


def wait_for_device(pl_module: pl.LightningModule) -> None:
    """Wait until the device of a module has finished its work."""
    torch.get_device_module(pl_module.device).synchronize()


# ---- random state


class RandomState(Callback):
    """Save and restore the random state of every device, so that a resumed run draws the same numbers (dropout).

    With another number of devices, the states stay those of the seed of the run. Dropout masks are then reproducible,
    but differ from those of an uninterrupted run.
    """

    def __init__(self) -> None:
        self._restored: list[Tensor] | None = None  # CPU and accelerator, uint8 (devices, n) each

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, checkpoint: dict[str, object]
    ) -> None:
        """Gather the states of all devices."""
        states = [torch.get_rng_state()]
        if pl_module.device.type != "cpu":
            states.append(torch.get_device_module(pl_module.device).get_rng_state())
        checkpoint["random_state"] = [gather_rows(trainer, pl_module, state).cpu() for state in states]

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: ImageClassifier, checkpoint: dict[str, Any]) -> None:
        """Keep the states until the end of the set-up, which also draws numbers."""
        self._restored = checkpoint.get("random_state")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state of this device."""
        if self._restored is None or len(self._restored[0]) != trainer.world_size:
            return
        # Clone the rows, because torch reads a state through an aligned pointer, and a row may not be aligned.
        cpu_state, *device_states = (states[trainer.global_rank].clone() for states in self._restored)
        torch.set_rng_state(cpu_state)
        if device_states and pl_module.device.type != "cpu":
            torch.get_device_module(pl_module.device).set_rng_state(device_states[0])


# ---- progress


def last_epoch(trainer: pl.Trainer) -> int | None:
    """Return the number of epochs of the training, None without a limit. `max_steps` may end it earlier."""
    epochs = getattr(trainer.datamodule, "epochs", None) or trainer.max_epochs or -1  # type: ignore[attr-defined]
    return epochs if epochs > 0 else None


class EpochLines(Callback):
    """Print one line per epoch: training and validation loss and accuracy, and seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_line = 0.0  # seconds of the fit at the last line
        self._validated = False  # since the last line

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting here, also in a resumed run."""
        self._last_line = self._clock.seconds
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the validation in the next line only."""
        self._validated = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print why the training was stopped before its last epoch."""
        if not trainer.is_global_zero or trainer.current_epoch == last_epoch(trainer):
            return
        for stop in trainer.early_stopping_callbacks:
            if stop.wait_count >= stop.patience:
                say(f"stopped early: {counted(stop.wait_count, 'validation')} without a better {stop.monitor}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Print the line when its training loss is known."""
        if not trainer.is_global_zero:
            return
        seconds, self._last_line = self._clock.seconds - self._last_line, self._clock.seconds
        epochs = last_epoch(trainer) or "…"
        epoch = f"epoch {trainer.current_epoch + 1:>{len(str(epochs))}}/{epochs}"
        parts = []
        if self._validated:
            metrics = trainer.callback_metrics
            names = {"loss": "loss", "accuracy": "acc"}
            monitor = pl_module.hparams["monitor"]
            if monitor not in names:
                names[monitor] = monitor
            scores = [f"{text} {float(metrics[f'val/{name}']):.4f}" for name, text in names.items()]
            parts.append(f"val {' '.join(scores)}")
        self._validated = False
        parts.append(f"{seconds:.1f} s")
        means: dict[str, Any] = {**trainer.callback_metrics, **pl_module.rows.epoch_means()}
        names = {"train/loss": "loss", "train/accuracy": "acc"}
        texts = [f"{text} {float(means[name]):.4f}" for name, text in names.items() if name in means]
        if texts:
            parts.insert(0, f"train {' '.join(texts)}")
        rich.get_console().print(" · ".join([epoch, *parts]), highlight=False, soft_wrap=True)
