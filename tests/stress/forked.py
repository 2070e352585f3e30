"""Commands of `cifar-lit` in forks of a process with all imports done: they start in milliseconds, not seconds.

A killed fork loses its memory and locks and leaves its files, like any process. Imports cannot be interrupted.
pytest must not be forked, so `python -m stress.forked` is a server that calls functions, one line of JSON each.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in linux/prctl.h
LIMIT = 120.0  # seconds after which a command counts as frozen
TINY = """train --recipe quickstart --accelerator cpu --precision 32-true --net lenet --data.val_size 20
    --data.image_size 16 --batch-size 8 --data.augment.crop 2 --weight_average.decay 0.9"""
# 13 steps per epoch, with regular checkpoints.
SMALL_TRAINING = f"{TINY} --data.count 121 --epochs 3 --checkpoint-every 4 --trainer.log_every_n_steps 5".split()
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def clean_environment() -> dict[str, str]:
    """Return the environment without variables of a launcher or another run."""
    ours = {name for name in os.environ if name.startswith("CIFAR_LIT_")} - {"CIFAR_LIT_CACHE"}
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, *ours)}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def warm() -> None:
    """Import everything that a training needs, with one thread, because a fork keeps only one."""
    from cifar_lit.cli.quiet import quieten

    quieten()
    torch.set_num_threads(1)
    import_module("cifar_lit.cli.fit")


def size(name: str, default: int) -> int:
    """Return the amount of work of a stress test, from a variable such as STRESS_KILLS=50."""
    return int(os.environ.get(f"STRESS_{name}", default))


class Forked:
    """A command in one or more forked processes.

    Args:
        argv: arguments of the command, or a function that returns the exit code.
        folder: working folder.
        log: file for the output of all processes; `{rank}` in its name makes a file per rank.
        processes: number of processes with torchrun's variables, or the variables of each process.
        more: further variables of all processes.
    """

    def __init__(
        self,
        argv: Sequence[str] | Callable[[], int],
        folder: Path,
        log: Path,
        processes: int | Sequence[Mapping[str, str]] = 1,
        more: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = log.with_name(log.name.format(rank=0))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids: list[int] = []
        meet = {} if processes == 1 else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        for rank, own in enumerate(_torchrun(processes) if isinstance(processes, int) else processes):
            pid = os.fork()
            if pid == 0:
                group = self.pids[0] if self.pids else 0
                path = log.with_name(log.name.format(rank=rank))
                _become(argv, folder, path, clean_environment() | meet | own | (more or {}), group)
            with suppress(OSError):  # the child does the same, to avoid a race
                os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)
        self.codes: dict[int, int] = {}
        self.started = time.monotonic()

    @property
    def running(self) -> bool:
        """Whether a process still runs."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one process, or to all of them and their children."""
        with suppress(ProcessLookupError):
            if rank is None:
                os.killpg(self.pids[0], number)
            else:
                os.kill(self.pids[rank], number)

    def wait(self, seconds: float = LIMIT) -> list[int]:
        """Return the exit codes by rank. Raise AssertionError if a process does not end in time."""
        deadline = time.monotonic() + seconds
        try:
            while self.running:
                time.sleep(0.005)
                if time.monotonic() > deadline:
                    self.send(signal.SIGUSR1)  # prints the stack
                    time.sleep(0.5)
                    log = self.log.read_text()[-6000:]
                    raise AssertionError(f"a command did not end within {seconds:.0f} s: {log}")
        finally:
            self.end()
        return [self.codes[pid] for pid in self.pids]

    def finish(self, seconds: float = LIMIT) -> None:
        """Wait until all processes have succeeded."""
        codes = self.wait(seconds)
        assert not any(codes), f"{codes}: {self.log.read_text()[-2000:]}"

    def end(self) -> None:
        """Kill the processes and their children."""
        self.send(signal.SIGKILL)
        while self.running:
            time.sleep(0.001)


def _torchrun(processes: int) -> list[dict[str, str]]:
    if processes == 1:
        return [{}]
    shared = {"TORCHELASTIC_RUN_ID": "forks", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _become(
    argv: Sequence[str] | Callable[[], int], folder: Path, log: Path, environment: Mapping[str, str], group: int
) -> None:
    """Run the command in this fork and exit."""
    code = 70
    try:
        with suppress(OSError):
            os.setpgid(0, group)
        with suppress(OSError, AttributeError):  # Linux: the fork dies with the test
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

        code = argv() if callable(argv) else main(list(argv))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Answer each call [module, name, arguments] on stdin with [result, None] or [None, traceback]."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warm()
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        try:
            answer = [getattr(import_module(module), name)(**arguments), None]
        except Exception:
            answer = [None, traceback.format_exc()]
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve()
