"""Commands of `cifar-lit` in forks of this process, which has everything imported: they start in milliseconds, not seconds.

A fork is a process of its own in all that matters here: its memory is gone when it is killed, its files stay, its locks are
taken back. What it cannot show is a kill during the imports: see `cifar_lit.drills.starts`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from cifar_lit.distributed.network import free_port
from cifar_lit.drills.phases import PHASES, VARIABLE
from cifar_lit.errors import Failure, UsageError

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in linux/prctl.h
LIMIT = 60.0  # seconds after which a command counts as frozen
STRANGE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("CIFAR_LIT_RESUME", "CIFAR_LIT_HUB", "CIFAR_LIT_JOB", "CIFAR_LIT_JOB_RUN"),
)


def warm() -> None:
    """Imports what a training needs, on one thread: a fork has no other; raises UsageError where nothing can be forked."""
    if not hasattr(os, "fork"):
        raise UsageError("this drill forks its trainings, which this system cannot do: run it on Linux")
    from cifar_lit.cli.quiet import quieten

    quieten()
    torch.set_num_threads(1)
    import cifar_lit.cli.app  # noqa: F401


class Forked:
    """A command in one process or in several, as torchrun would start them; `log` takes what they print.

    words: of the command, or a function that returns the exit code.
    """

    def __init__(
        self,
        words: Sequence[str] | Callable[[], int],
        folder: Path,
        log: Path,
        processes: int = 1,
        more: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._said = b"s"
        self._pipe, write = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in STRANGE}
        environment |= {"OMP_NUM_THREADS": "1", **(more or {})}
        several = _torchrun(processes) if processes > 1 else {}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids: list[int] = []
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if several else {}
            if rank == 0:
                own[VARIABLE] = str(write)
            pid = os.fork()
            if pid == 0:
                _become(words, folder, log, {**environment, **several, **own}, self.pids[0] if self.pids else 0)
            with suppress(OSError):  # the child does it too: whoever comes first
                os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)
        os.close(write)
        os.set_blocking(self._pipe, False)
        self.codes: dict[int, int] = {}
        self.started = time.monotonic()

    @property
    def phase(self) -> str:
        """What the first process said last that it is doing."""
        return PHASES[self._said[-1:]]

    def count(self, phase: str) -> int:
        """How often a phase began."""
        return sum(PHASES[bytes([said])] == phase for said in self._said)

    def listen(self, seconds: float) -> bool:
        """Waits that long for the next announcement; returns whether a process still runs."""
        if select.select([self._pipe], [], [], seconds)[0]:
            with suppress(BlockingIOError):
                self._said += os.read(self._pipe, 4096)
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def send(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to one process, or to all with what they have started."""
        with suppress(ProcessLookupError):
            if rank is None:
                os.killpg(self.pids[0], number)
            else:
                os.kill(self.pids[rank], number)

    def wait(self, seconds: float = LIMIT) -> list[int]:
        """The exit codes, by rank, of processes that are to end by themselves; raises Failure when they do not in time."""
        deadline = time.monotonic() + seconds
        try:
            while self.listen(0.005):
                if time.monotonic() > deadline:
                    self.send(signal.SIGUSR1)  # it says where it stands
                    time.sleep(0.5)
                    raise Failure(f"a command did not end within {seconds:.0f} s; it said: {self.log.read_text()[-6000:]}")
        finally:
            self.end()
        return [self.codes[pid] for pid in self.pids]

    def end(self) -> None:
        """Kills what still runs, and what that has started."""
        self.send(signal.SIGKILL)
        while self.listen(0.001):
            pass
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = os.open(os.devnull, os.O_RDONLY)


def _torchrun(processes: int) -> dict[str, str]:
    number = str(processes)
    return {
        "TORCHELASTIC_RUN_ID": "drill",
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def _become(
    words: Sequence[str] | Callable[[], int], folder: Path, log: Path, environment: dict[str, str], group: int
) -> NoReturn:
    """Turns this process, a fork, into the command; never returns."""
    code = 70
    try:
        with suppress(OSError):
            os.setpgid(0, group)
        with suppress(OSError, AttributeError):  # Linux: so that none is left when the drill itself is killed
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(place), "w", buffering=1) for place in (1, 2))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["cifar-lit"]
        faulthandler.register(signal.SIGUSR1, file=descriptor)
        from cifar_lit.cli import main

        code = words() if callable(words) else main(list(words))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
