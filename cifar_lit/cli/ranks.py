"""The processes (ranks) of a training that Lightning starts on this machine end together.

Under torchrun and SLURM, the launcher ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.base.text import note
from cifar_lit.cli.launch import PARENT, is_child

EXIT_SECONDS = 5.0  # time for a process to end by itself
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class ChildRanks(Callback):
    """End this process if a rank that it has started fails.

    Lightning's observer would kill this process as soon as a rank has ended, before it prints how to resume.
    """

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._ends = threading.Event()  # this process ends by itself

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Watch the ranks in place of Lightning's observer, which ends when its list is empty."""
        started = getattr(trainer.strategy.launcher, "procs", [])
        if started:
            self._ranks += started
            started.clear()
            threading.Thread(target=self._watch, args=[trainer], name="child ranks", daemon=True).start()

    def _watch(self, trainer: pl.Trainer) -> None:
        while not any(rank.poll() for rank in self._ranks):
            time.sleep(1)
        if self._ends.wait(2 * EXIT_SECONDS):  # usually, this process fails too
            return
        note("cifar-lit: another process of this run failed: see its message")
        self.end(trainer)
        os._exit(1)

    def end(self, trainer: pl.Trainer) -> None:
        """Wait shortly for the ranks to end by themselves, then kill them."""
        self._ends.set()
        ranks = [*self._ranks, *getattr(trainer.strategy.launcher, "procs", [])]
        deadline = time.monotonic() + EXIT_SECONDS
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
            rank.wait()


def end_with_parent() -> None:
    """Let Linux kill this process when the process that started it as a rank ends."""
    if not is_child():
        os.environ[PARENT] = str(os.getpid())
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
