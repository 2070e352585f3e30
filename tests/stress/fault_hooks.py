"""A training that says, byte by byte through a pipe, what it is doing, so that a drill knows where a kill fell."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.training.checkpoint import AtomicCheckpointIO

VARIABLE = "CIFAR_LIT_DRILL"  # the pipe's descriptor
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


class Announce(Callback):
    """Announces the phases of `PHASES` from `t` on, if there is a pipe to announce them through."""

    takes_chunks = True

    def __init__(self) -> None:
        self._pipe = int(os.environ.get(VARIABLE, "-1"))
        self._phase = b"s"
        if self._pipe >= 0:
            self._watch_checkpoints()

    def _say(self, phase: bytes) -> bytes:
        before, self._phase = self._phase, phase
        if self._pipe >= 0:
            os.write(self._pipe, phase)
        return before

    def _watch_checkpoints(self) -> None:
        save, sync = AtomicCheckpointIO.save_checkpoint, os.fsync

        def announced(*args: Any, **kwargs: Any) -> None:
            before = self._say(b"w")
            save(*args, **kwargs)
            self._say(before)

        def synced(fd: Any) -> None:
            if self._phase == b"w":
                self._say(b"y")
            sync(fd)

        AtomicCheckpointIO.save_checkpoint = announced  # type: ignore[method-assign]
        os.fsync = synced

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Steps begin."""
        self._say(b"t")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch's validation begins."""
        self._say(b"v")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Steps go on."""
        self._say(b"t")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The training is over."""
        self._say(b"e")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The test begins."""
        self._say(b"x")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What is left is to write the results down."""
        self._say(b"r")
