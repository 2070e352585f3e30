"""Callbacks that let a stress test follow a training and inject faults. Each needs its environment variable."""

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

PIPE = "STRESS_PIPE"  # Announce: descriptor of a pipe
FOLDER = "STRESS_FOLDER"  # Faults: folder of its files
SAMPLES = "STRESS_SAMPLES"  # Samples: EPOCH,EPOCH:FILE
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
HOLD = "STRESS_HOLD"  # Announce: `2 validation` waits HOLD_SECONDS at the start of the second validation
HOLD_SECONDS = 0.5
CLOCK = "STRESS_CLOCK"  # ClockJump: seconds
PAUSE = 0.02  # seconds per step under Faults, time for a fault to arrive
CRASH, KILL, FREEZE, HANG = "crash", "kill -9", "SIGSTOP", "hang"


def _announced(phase: bytes) -> Callable[..., None]:
    def hook(announce: Announce, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        announce._say(phase)

    return hook


class Announce(Callback):
    """Write a byte of `PHASES` to a pipe at the start of each phase, to know in which phase a kill hit."""

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
    """Create `ready-<rank>` in the second epoch, and look for a fault in `fault-<rank>` at every step."""

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
        if fault == HANG:  # like a read from a lost file system; other threads continue
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if fault == KILL else signal.SIGSTOP)


class ClockJump(Callback):
    """Shift the time of day in this process in the middle of the second epoch."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if CLOCK in os.environ and (trainer.current_epoch, batch_idx) == (1, 5):
            seconds, now, now_ns = int(os.environ[CLOCK]), time.time, time.time_ns
            time.time, time.time_ns = lambda: now() + seconds, lambda: now_ns() + seconds * 10**9


class Samples(Callback):
    """Write the resources of the process and its run folder at some epochs, a line of JSON each."""

    def __init__(self) -> None:
        epochs, _, self._file = os.environ.get(SAMPLES, "").partition(":")
        self._epochs = [int(epoch) for epoch in epochs.split(",") if epoch]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the sample of an epoch at the start of the next, after its checkpoints are written."""
        if trainer.current_epoch in self._epochs:
            gc.collect()
            folder = Path(str(trainer.checkpoint_callbacks[0].dirpath)).parent  # type: ignore[attr-defined]
            with Path(self._file).open("a") as file:
                file.write(json.dumps(resources(folder)) + "\n")


def resources(folder: Path) -> dict[str, int]:
    """Return resident memory, open files and threads of this process, and number and size of the files in `folder`."""
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
