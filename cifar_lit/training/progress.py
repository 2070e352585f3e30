"""What a training shows while it runs: a live bar on a terminal, and a line an epoch everywhere."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import rich
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme

from cifar_lit.training.callbacks import Clock


class LiveBar(RichProgressBar):
    """Lightning's rich bar with the loss and accuracy that were last logged, so that it never waits for the device."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10, theme=RichProgressBarTheme(metrics_format=".4f"))

    def _get_train_description(self, current_epoch: int) -> str:
        """Counts epochs as the lines do, from 1; Lightning's own counts from 0."""
        return f"epoch {current_epoch + 1}/{self.trainer.max_epochs}"

    @property
    def total_train_batches(self) -> int | float:
        """Batches of an epoch, where Lightning's bar counts what the loader hands over, which may be several."""
        loader: Any = self.trainer.train_dataloader
        return loader.batch_count if getattr(loader, "chunk", 1) > 1 else super().total_train_batches

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Goes on by the batches that were trained on."""
        loader: Any = trainer.train_dataloader
        done = loader.position if getattr(loader, "chunk", 1) > 1 else batch_idx + 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, done - 1)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Training loss and accuracy since the last log line, and the last validation's accuracy."""
        return dict(getattr(pl_module, "progress", {}))


class EpochLines(Callback):
    """Prints one line an epoch: training and validation loss and accuracy, seconds, images a second.

    clock: measures the fit.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before = (0.0, 0.0, 0)

    def _now(self) -> tuple[float, float, int]:
        return self._clock.seconds, self._clock.training_seconds, self._clock.images

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch that is resumed in its middle has no start of its own."""
        self._before = self._now()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remembers where the epoch starts."""
        self._before = self._now()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the line."""
        if not trainer.is_global_zero:
            return
        loss, accuracy = pl_module.epoch_means()  # type: ignore[operator]
        seconds, training, images = (now - before for now, before in zip(self._now(), self._before, strict=True))
        speed = images / max(training, 1e-9)
        last = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "…"
        parts = [f"epoch {trainer.current_epoch + 1:>{len(str(last))}}/{last}", f"train loss {loss:.4f} accuracy {accuracy:.4f}"]
        if trainer.num_val_batches and "val/loss" in trainer.callback_metrics:
            metrics = trainer.callback_metrics
            parts.append(f"val loss {float(metrics['val/loss']):.4f} accuracy {float(metrics['val/accuracy']):.4f}")
        parts.append(f"{seconds:.1f} s · {speed:,.0f} images/s")
        rich.get_console().print(" · ".join(parts), highlight=False, soft_wrap=True)
