"""The run folder as a Lightning callback, with the callbacks and loggers that write to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers.logger import Logger
from torchvision.utils import make_grid

from cifar_lit.base.files import write_text
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.loggers import (
    TRACKERS,
    CurveFile,
    TensorBoardCurves,
    augmented_sample,
    logged_settings,
    logger_names,
    start_tracker,
)
from cifar_lit.training.callbacks import Clock, EpochLines, RandomState
from cifar_lit.training.checkpoint import best_checkpoint, last_checkpoint, regular_checkpoint
from cifar_lit.training.orderly_stop import NoSignalHandlers, OrderlyStop


class Run(Callback):
    """Claim a run folder, write its config.yaml, and create the callbacks and loggers that write to it.

    Args:
        folder: the folder, claimed in the `setup` of the last callback.
        settings: the parsed configuration as nested plain values.
        notes: additional lines of the start card by name. `resume` and `step` identify the checkpoint that is resumed.
        command: fit, train (fit and test), validate, test or predict.
        monitored: score that selects the best checkpoint, as in `best_checkpoint`.
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
        self.boards: list[TensorBoardCurves] = []  # loggers of pictures
        self.trackers: list[str] = []  # names of those that start with the training
        self.loggers: list[Logger] = []  # those that the Trainer gets when the folder is claimed

    def callbacks(self, validates: bool, further: Sequence[Callback] = ()) -> list[Callback]:
        """Return the Trainer's callbacks. The last one claims the folder, so that an earlier failure leaves none.

        Args:
            validates: keep the best checkpoint.
            further: called after those of the run.
        """
        callbacks: list[Callback] = [NoSignalHandlers(), self, self.clock]
        claim = LambdaCallback(setup=self.claim)
        if not self.trains:
            return [*callbacks, *further, claim]
        callbacks += [EpochLines(self.clock), RandomState()]
        if validates:
            callbacks.append(self.best)
        callbacks.append(self.last)
        if interval := self.settings.get("checkpoint_every"):
            callbacks.append(regular_checkpoint(interval))
        callbacks.append(OrderlyStop(self.last))
        return [*callbacks, *further, claim]

    def create_loggers(self) -> None:
        """Create metrics.csv and those of the setting `logger` for a training, TensorBoard for `test`, else none."""
        if self.command == "test":
            self.boards = [TensorBoardCurves(self.folder, None)]
        self.loggers = [*self.boards]
        if not self.trains:
            return
        resumed_step = None
        if "step" in self.notes:
            resumed_step = int(self.notes["step"])
        names = logger_names(self.settings["logger"])
        if "tensorboard" in names:
            self.boards = [TensorBoardCurves(self.folder, logged_settings(self.settings), resumed_step)]
        self.trackers = [name for name in TRACKERS if name in names]
        self.loggers = [*self.boards, CurveFile(self.folder, resumed_step)]

    @property
    def checkpoint(self) -> str:
        """Path of the checkpoint to use after the fit: the best one, or the last one without validation."""
        return self.best.best_model_path or f"{self.last.dirpath}/last.ckpt"

    def claim(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Claim the folder, after features and training loader have checked the settings."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if stage == "fit":
            trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]
        path = ""
        if trainer.is_global_zero:
            path = str(self.folder.claim())
        path = trainer.strategy.broadcast(path)
        self.folder.follow(Path(path))
        for checkpoint in trainer.checkpoint_callbacks:
            if getattr(checkpoint, "dirpath", "") is None:
                checkpoint.dirpath = f"{path}/checkpoints"  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            if self.trains:  # marks the run as a training, even if it is killed before its first checkpoint
                (self.folder.path / "checkpoints").mkdir(exist_ok=True)
            if not self.folder.resumed:
                write_text(self.folder.path / "config.yaml", self.config)
        trainer.loggers = [*self.loggers, *trainer.loggers]
        self.loggers = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make a resumed run the newest one after its checkpoint has been loaded."""
        if self.folder.resumed and trainer.is_global_zero:
            (self.folder.path / "config.yaml").touch()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create metrics.csv, start the trackers and log augmented training images, before the clock starts."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, CurveFile) and not self.folder.resumed:
                logger.create()
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            trainer.loggers += [start_tracker(name, self.folder, self.settings) for name in self.trackers]
        boards = [board for board in self.boards if board in trainer.loggers]
        if boards and not self.folder.resumed:
            picture = make_grid(augmented_sample(trainer.datamodule, 64), nrow=8)  # type: ignore[attr-defined]
            for board in boards:
                board.log_images("images/train", picture)
