"""A training that ends with a loss that is not finite leaves one file for `cifar-lit replay`.

The file holds the last checkpoint, from which the training resumes exactly: other trainings pay nothing for it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from cifar_lit.files import atomic_write
from cifar_lit.training.callbacks import NotFiniteLoss
from cifar_lit.training.checkpoint import LAST, latest_valid_checkpoint

FILE, RECORD = "not-finite.ckpt", "not_finite"


class ReplayFile(Callback):
    """After a NotFiniteLoss, write the last checkpoint, config.yaml and the number of the step to one file.

    Args:
        folder: the RunFolder.
        config: text of config.yaml.
    """

    def __init__(self, folder: Any, config: str) -> None:
        self.folder, self.config = folder, config

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the file. A further error must not replace the first."""
        if not isinstance(exception, NotFiniteLoss) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with suppress(Exception):
            trainer.strategy.checkpoint_io.teardown()  # waits for asynchronous writes
            last = Path(self.folder.path, "checkpoints", LAST)
            checkpoint = latest_valid_checkpoint(last).contents if last.exists() else {"state_dict": {}}
            with atomic_write(self.folder.path / FILE) as partial:
                torch.save({**checkpoint, RECORD: {"config": self.config, "step": exception.step}}, partial)
            exception.file = self.folder.path / FILE
