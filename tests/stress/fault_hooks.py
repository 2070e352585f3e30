"""Callbacks that let a stress test follow a training from outside, and make it fail; without its variable each does nothing."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

PIPE = "STRESS_PIPE"  # for Announce: the descriptor of a pipe
FOLDER = "STRESS_FOLDER"  # for Faults: the folder of the files that it writes and reads
SAMPLES = "STRESS_SAMPLES"  # for Samples: EPOCH,EPOCH:FILE
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
HOLD = "STRESS_HOLD"  # for Announce: such as `2 validation`, at the beginning of which it waits for `HOLD_SECONDS`
HOLD_SECONDS = 0.5
CLOCK = "STRESS_CLOCK"  # for ClockJump: seconds
PAUSE = 0.02  # seconds a step under Faults, so that there is time to meddle
CRASH, KILL, FREEZE, HANG = "crash", "kill -9", "SIGSTOP", "hang"


def _announced(phase: bytes) -> Callable[..., None]:
    def hook(announce: Announce, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        announce._say(phase)

    return hook


class Announce(Callback):
    """Says through a pipe, a byte of `PHASES` each time, what the training is doing, so that one knows where a kill fell."""

    def __init__(self) -> None:
        self._pipe = int(os.environ.get(PIPE, "-1"))
        self._phase = b"s"
        self._times: Counter[bytes] = Counter()

    def _say(self, phase: bytes) -> bytes:
        before, self._phase = self._phase, phase
        if self._pipe >= 0:
            os.write(self._pipe, phase)
            self._times[phase] += 1
            if os.environ.get(HOLD) == f"{self._times[phase]} {PHASES[phase]}":
                time.sleep(HOLD_SECONDS)
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


class Faults(Callback):
    """Each rank makes a file `ready-<rank>` in its second epoch, and looks at every step for a fault in `fault-<rank>`."""

    def __init__(self) -> None:
        self._folder = os.environ.get(FOLDER)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._folder is None or trainer.current_epoch == 0:
            return
        Path(self._folder, f"ready-{trainer.global_rank}").touch()
        try:
            fault = Path(self._folder, f"fault-{trainer.global_rank}").read_text()
        except OSError:
            time.sleep(PAUSE)
            return
        if fault == CRASH:
            raise RuntimeError("the stress test asked for it")
        if fault == HANG:  # as in a read from a file system that is gone; other threads go on
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if fault == KILL else signal.SIGSTOP)


class ClockJump(Callback):
    """Sets the time of day in its process by so many seconds, in the middle of the second epoch."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if CLOCK in os.environ and (trainer.current_epoch, batch_idx) == (1, 5):
            seconds, now, now_ns = int(os.environ[CLOCK]), time.time, time.time_ns
            time.time, time.time_ns = lambda: now() + seconds, lambda: now_ns() + seconds * 10**9


class Samples(Callback):
    """Writes at some epochs what the process and its run folder hold, a line of JSON each."""

    def __init__(self) -> None:
        epochs, _, self._file = os.environ.get(SAMPLES, "").partition(":")
        self._epochs = [int(epoch) for epoch in epochs.split(",") if epoch]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A sample after an epoch is taken before the next, when its checkpoints are written."""
        if trainer.current_epoch in self._epochs:
            gc.collect()
            folder = Path(str(trainer.checkpoint_callbacks[0].dirpath)).parent  # type: ignore[attr-defined]
            with Path(self._file).open("a") as file:
                file.write(json.dumps(held(folder)) + "\n")


def held(folder: Path) -> dict[str, int]:
    """Bytes resident, open files and threads of this process; of `folder` the files and their bytes, curves apart."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    curves = [path for path in sizes if path.name == "metrics.csv" or "tfevents" in path.name]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "files": len(sizes),
        "disk": sum(size for path, size in sizes.items() if path not in curves),
        "curves": sum(sizes[path] for path in curves),
    }
