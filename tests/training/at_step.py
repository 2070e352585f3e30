"""A callback for real commands. It reads its settings from the environment, so that a resumed run does nothing."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class AtStep(Callback):
    """Send AT_STEP_SIGNAL to this process in the step after AT_STEP, or if that is "start", before the training.

    AT_STEP_RANK restricts the signal to one rank. A restarted process sends none.
    At the end of training each rank saves its weights to the folder RANK_WEIGHTS.
    """

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if os.environ.get("AT_STEP") == str(trainer.global_step):
            self._send(trainer)

    def _send(self, trainer: pl.Trainer) -> None:
        restarted = any(os.environ.get(f"{name}_RESTART_COUNT", "0") != "0" for name in ("TORCHELASTIC", "SLURM"))
        if not restarted and os.environ.get("AT_STEP_RANK", str(trainer.global_rank)) == str(trainer.global_rank):
            os.kill(os.getpid(), int(os.environ["AT_STEP_SIGNAL"]))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if os.environ.get("AT_STEP") == "start":
            self._send(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if folder := os.environ.get("RANK_WEIGHTS"):
            torch.save(pl_module.state_dict(), f"{folder}/{trainer.global_rank}.pt")
