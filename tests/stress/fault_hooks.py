"""A callback that lets a stress test follow a training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

PIPE = "STRESS_PIPE"  # descriptor of a pipe
PHASES = {
    b"s": "start",
    b"t": "training",
    b"v": "validation",
    b"w": "checkpoint: writing",
    b"y": "checkpoint: syncing and renaming",
    b"e": "after the training",
    b"x": "test",
    b"r": "writing results",
}


def _announced(phase: bytes) -> Callable[..., None]:
    def hook(announce: Announce, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        announce._say(phase)

    return hook


class Announce(Callback):
    """Write a byte of `PHASES` to a pipe at the start of each phase, to know in which phase a kill hit."""

    def __init__(self) -> None:
        self._pipe = int(os.environ.get(PIPE, "-1"))
        self._phase = b"s"

    def _say(self, phase: bytes) -> bytes:
        before, self._phase = self._phase, phase
        if self._pipe >= 0:
            os.write(self._pipe, phase)
        return before

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        io = trainer.strategy.checkpoint_io
        if self._pipe < 0 or "save_checkpoint" in vars(io):
            return
        save, sync = io.save_checkpoint, os.fsync

        def announced(*args: Any, **kwargs: Any) -> None:
            before = self._say(b"w")
            save(*args, **kwargs)
            self._say(before)

        def synced(fd: Any) -> None:
            if self._phase == b"w":
                self._say(b"y")
            sync(fd)

        io.save_checkpoint = announced  # type: ignore[method-assign]
        os.fsync = synced

    on_train_start = on_validation_end = _announced(b"t")
    on_validation_start, on_train_end = _announced(b"v"), _announced(b"e")
    on_test_start, on_test_end = _announced(b"x"), _announced(b"r")
