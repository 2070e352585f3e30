"""A run folder as a Lightning callback, with the callbacks and loggers that write to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torchvision.utils import make_grid

from cifar_lit.errors import Failure
from cifar_lit.files import write_text
from cifar_lit.runs.figures import augmented_sample
from cifar_lit.runs.loggers import CurveFile, TensorBoardCurves, logged_settings
from cifar_lit.runs.run_folder import RunFolder, stamp_start
from cifar_lit.training.callbacks import Clock, DivergenceWarning, EpochLines, LiveBar, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, regular_checkpoint
from cifar_lit.training.orderly_stop import NoSignalHandlers, OrderlyStop


class Run(Callback):
    """Claim the folder of a command, let checkpoints and loggers write to it, and write its config.yaml.

    Args:
        folder: the folder, not created yet unless it is resumed.
        settings: the parsed configuration as nested plain values.
        config: its text, for config.yaml.
        notes: further lines of the start card by name; `resume` and `step` name the checkpoint that is resumed.
        command: fit, train (a fit with a test), validate, test or predict.
        monitored: the score that the best checkpoint is chosen by, as in `best_checkpoint`.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: dict[str, Any],
        config: str,
        notes: dict[str, str],
        command: str,
        monitored: tuple[str, str] = ("val/accuracy", "max"),
    ) -> None:
        self.folder, self.settings, self.config, self.notes = folder, settings, config, notes
        self.command, self.trains = command, command in ("fit", "train")
        self.clock = Clock()
        self.best, self.last = best_checkpoint(*monitored), last_checkpoint()
        self.board: TensorBoardCurves | None = None

    def callbacks(self, validates: bool, bar: bool) -> list[Callback]:
        """Return the Trainer's callbacks: the best checkpoint only if there is validation, a live bar if `bar`."""
        callbacks: list[Callback] = [NoSignalHandlers(), self, *([LiveBar()] if bar else [])]
        if self.trains:
            callbacks += [self.clock, EpochLines(self.clock), RandomState(), DivergenceWarning()]
            callbacks += [self.best, self.last] if validates else [self.last]
            if interval := self.settings.get("checkpoint_every"):
                callbacks.append(regular_checkpoint(interval))
            callbacks.append(OrderlyStop(self.last))
        return callbacks

    def loggers(self, resumed_step: int | None) -> list[Logger]:
        """Return TensorBoard and metrics.csv for a training, TensorBoard for `test`, no logger for `validate` and `predict`."""
        if self.trains:
            self.board = TensorBoardCurves(self.folder, logged_settings(self.settings), resumed_step)
            return [self.board, CurveFile(self.folder, resumed_step)]
        self.board = TensorBoardCurves(self.folder, None) if self.command == "test" else None
        return [self.board] if self.board else []

    @property
    def checkpoint(self) -> str:
        """Path of the checkpoint to use after the fit: the best one, or the last one without validation."""
        return self.best.best_model_path or f"{self.last.dirpath}/last.ckpt"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Claim the folder. Raise Failure if processes would start from different checkpoints."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        start = " of step ".join(
            filter(None, ("/".join(Path(self.notes.get("resume", "")).parts[-3:]), self.notes.get("step")))
        )
        path, first = trainer.strategy.broadcast((str(self.folder.path) if trainer.is_global_zero else "", start))
        if start != first:  # on a file system that shows changes late or not at all to some nodes
            raise Failure(
                f"process {trainer.global_rank} would start from {start or 'the beginning'}, the first one from "
                f"{first or 'the beginning'}: --logs must be a folder that all processes see alike"
            )
        self.folder.follow(Path(path))
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", "") is None:
                checkpoint.dirpath = f"{path}/checkpoints"  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            if self.trains:  # marks a run that is killed before its first checkpoint as a training
                (self.folder.path / "checkpoints").mkdir(exist_ok=True)
            if not self.folder.resumed:
                self._write_config()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the changed configuration of a resumed run, once its checkpoint is loaded."""
        if self.folder.resumed and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write_config()

    def _write_config(self) -> None:
        write_text(self.folder.path / "config.yaml", self.config)
        stamp_start(self.folder.path)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show augmented training images in TensorBoard."""
        if trainer.is_global_zero and self.board in trainer.loggers and not self.folder.resumed:
            data = trainer.datamodule  # type: ignore[attr-defined]
            self.board.log_images("images/train", make_grid(augmented_sample(data, 64), nrow=8))
