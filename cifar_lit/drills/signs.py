"""A training of several ranks that a drill can follow from outside, by files in a folder, and make fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

VARIABLE = "CIFAR_LIT_RANK_DRILL"  # the folder; without it nothing happens
PAUSE = 0.02  # seconds a step, so that there is time to meddle
CRASH, KILL, FREEZE = "crash", "kill -9", "SIGSTOP"


class Signs(Callback):
    """Each rank makes a file `ready-<rank>` in its second epoch, and looks at every step for a fault in `fault-<rank>`."""

    def __init__(self) -> None:
        self._folder = os.environ.get(VARIABLE)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        if self._folder is None or trainer.current_epoch == 0:
            return
        Path(self._folder, f"ready-{trainer.global_rank}").touch()
        try:
            fault = Path(self._folder, f"fault-{trainer.global_rank}").read_text()
        except OSError:
            time.sleep(PAUSE)
            return
        if fault == CRASH:
            raise RuntimeError("the drill asked for it")
        os.kill(os.getpid(), signal.SIGKILL if fault == KILL else signal.SIGSTOP)
