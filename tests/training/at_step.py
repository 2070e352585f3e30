"""A callback for real commands, told by the environment what to do and when, so that a resumed run does nothing."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class AtStep(Callback):
    """In the step after AT_STEP sends its own process AT_STEP_SIGNAL.

    With AT_STEP_RANK only that process does, and in no case does one that was started again. AT_STAGE is the name of
    another moment for the signal: fit (before its first step), validation or test.

    At the end of a training every process leaves its weights in the folder RANK_WEIGHTS.
    """

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if os.environ.get("AT_STEP") == str(trainer.global_step):
            self._send(trainer)

    def _send(self, trainer: pl.Trainer) -> None:
        again = any(os.environ.get(f"{name}_RESTART_COUNT", "0") != "0" for name in ("TORCHELASTIC", "SLURM"))
        if not again and os.environ.get("AT_STEP_RANK", str(trainer.global_rank)) == str(trainer.global_rank):
            os.kill(os.getpid(), int(os.environ["AT_STEP_SIGNAL"]))

    def _at_stage(self, trainer: pl.Trainer, name: str) -> None:
        if os.environ.get("AT_STAGE") == name:
            self._send(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at_stage(trainer, "fit")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at_stage(trainer, "validation")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at_stage(trainer, "test")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if folder := os.environ.get("RANK_WEIGHTS"):
            torch.save(pl_module.state_dict(), f"{folder}/{trainer.global_rank}.pt")
