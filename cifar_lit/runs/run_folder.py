"""Run folders: `<logs>/<recipe>-<number>`, each claimed and locked by one process, and what is read of them."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import remove_partial_files, write_text

LOCK, OWNER = ".lock", ".owner"
JOB = ".job"  # of a scheduler, that a run was started by
# In the order in which a run is gone on from them.
_, PREVIOUS, _ = CHECKPOINTS = ("checkpoints/last.ckpt", "checkpoints/previous.ckpt", "checkpoints/best.ckpt")


class Owner(NamedTuple):
    """The process that writes a run folder, or was killed while writing it."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def owner_of(run: Path) -> Owner | None:
    """Who writes a run folder, or was killed while writing it; None after an orderly end."""
    try:
        record = json.loads((run / OWNER).read_text())
        return Owner(int(record["pid"]), str(record["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RunLock:
    """The lock of a run folder, held from `acquire` to `release`.

    The lock is filelock's, which the system takes back when the process ends. Beside it lies a record of who holds it, which
    filelock's own file cannot say: whoever tries to lock it empties it.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = FileLock(run / LOCK, thread_local=False)

    def acquire(self) -> None:
        """Takes the lock, after a killed process too; says so where that one ran on another machine.

        Raises:
            Failure: The folder is being written (with the owner's process and host), or cannot be locked.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            owner = owner_of(self._run) or "another process"
            raise Failure(f"{owner} is writing {self._run}: wait until it ends, or start a new run without --resume") from None
        except PermissionError:
            raise
        except OSError as error:
            raise Failure(f"cannot lock {self._run}: {error.strerror}. Choose another place with --logs DIR.") from None
        try:
            before, host = owner_of(self._run), socket.gethostname()
            if before and before.host != host:  # lost with its machine, or of a file system that shares no locks
                print(f"{self._run} was left by {before}; going on with it", file=sys.stderr)
            write_text(self._run / OWNER, json.dumps({"pid": os.getpid(), "host": host}) + "\n")
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        """Gives the lock back and removes its traces; without a lock nothing happens."""
        if not self._lock.is_locked:
            return
        (self._run / OWNER).unlink(missing_ok=True)
        with suppress(OSError):  # before it is given back, or it might be another's; where open files cannot be removed it stays
            (self._run / LOCK).unlink(missing_ok=True)
        self._lock.release()


class RunFolder:
    """A run's folder, made at the first look at `path`, so that what fails before leaves nothing behind.

    Args:
        logs: The folder of all runs.
        name: The recipe's.
        path: An existing run to go on with instead of a new one.
        first: Whether this is the run's first process; the others never claim a folder, they `follow` it.
        job: What a new folder records of the scheduler's job that it belongs to, so that the job, started again, finds it.

    Raises:
        Failure: The folder cannot be written, or another process is writing it.
    """

    def __init__(self, logs: Path, name: str, path: Path | None = None, first: bool = True, job: str | None = None) -> None:
        self.logs, self.name = logs, name
        self.resumed = path is not None
        self._path: Path | None = None
        self._lock: RunLock | None = None
        self._first, self._job = first, job
        if path is not None and first:
            self._hold(path)

    @property
    def path(self) -> Path:
        """The folder; the first process claims a new number at its first call, others see `logs` until they follow."""
        if self._path is None and self._first:
            path = self._claim()
            self._hold(path)
            if self._job:
                write_text(path / JOB, self._job)
        return self._path or self.logs

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self._path is not None and any((self._path / name).is_file() for name in CHECKPOINTS)

    def follow(self, path: Path) -> None:
        """Takes the folder that the first process has claimed."""
        if not self._first:
            self._path = path

    def _claim(self) -> Path:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            number = 1 + max((run_number(path, self.name) for path in self.logs.iterdir()), default=0)
            while True:
                path = self.logs / f"{self.name}-{number}"
                try:
                    path.mkdir()  # atomic: of two runs that start together, one goes on to the next number
                    return path
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise Failure(f"cannot make a run folder in {self.logs}: {error.strerror}. Choose another with --logs DIR.") from None

    def _hold(self, path: Path) -> None:
        lock = RunLock(path)
        lock.acquire()
        self._lock, self._path = lock, path
        remove_partial_files(path)  # of a process that was killed while it wrote

    def release(self) -> None:
        """Lets other processes go on with the folder."""
        if self._lock is not None:
            self._lock.release()


def display_path(path: Path) -> str:
    """A path as the user would type it: from the working folder where it lies below."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def run_number(path: Path, name: str) -> int:
    """The number of a run folder called `<name>-<number>`, 0 for anything else."""
    match = re.fullmatch(re.escape(name) + r"-(\d+)", path.name)
    return int(match[1]) if match else 0


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, None when it lies elsewhere."""
    folder = checkpoint.resolve().parent.parent
    return folder if checkpoint.resolve().parent.name == "checkpoints" and (folder / "config.yaml").is_file() else None


def find_resumable(logs: Path, name: str | None) -> Path:
    """The checkpoint that `--resume` goes on from.

    Args:
        name: A checkpoint, a run folder, or None for the newest run in `logs` that trained.

    Raises:
        UsageError: There is none.
    """
    if name is None:
        runs = [path.parent for path in logs.glob("*/checkpoints") if (path.parent / "config.yaml").is_file()]
        if not runs:
            raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
        checkpoint = _newest_checkpoint(max(runs, key=_started))
    else:
        path = Path(name).expanduser()
        checkpoint = _newest_checkpoint(path) if path.is_dir() else path
    if not checkpoint.is_file():
        raise UsageError(
            f"nothing to resume: there is no checkpoint {display_path(checkpoint)}. "
            "Name another run, or start one without --resume."
        )
    return checkpoint


def _started(run: Path) -> int:
    """When a run started or went on, which is when its config.yaml is written: nanoseconds."""
    return (run / "config.yaml").stat().st_mtime_ns


def _newest_checkpoint(run: Path) -> Path:
    """The checkpoint of a run that is to be gone on from; where there is none, the place where it would be."""
    places = [run / name for name in CHECKPOINTS]
    return next((place for place in places if place.is_file()), places[0])


def runs_of_job(logs: Path, belongs: Callable[[dict[str, Any]], bool]) -> list[Path]:
    """The trainings in `logs` whose record of a job `belongs` takes, if finished or fit to be gone on with; newest first."""
    runs = []
    for record in logs.glob(f"*/{JOB}"):
        run = record.parent
        with suppress(OSError, ValueError, RecursionError):  # no such record: then it is no job's
            job = json.loads(record.read_text())
            if isinstance(job, dict) and belongs(job) and (read_metrics(run) or _newest_checkpoint(run).is_file()):
                runs.append((_started(run), run))
    return [run for _, run in sorted(runs, reverse=True)]


def is_finished(run: Path, needs_test: bool) -> bool:
    """Whether a run has nothing left to do; `needs_test`: the command ends with a test."""
    metrics = read_metrics(run)
    return bool(metrics and (metrics.get("test") or not needs_test))


def check_unfinished(run: Path, needs_test: bool) -> None:
    """Raises UsageError when a run has nothing left to do; `needs_test`: the command ends with a test."""
    if is_finished(run, needs_test):
        results = display_path(run / "metrics.json")
        raise UsageError(f"{display_path(run)} is finished: its results are in {results}. Start a new run without --resume.")


def weights_file(path: str | Path) -> Path:
    """The `model.safetensors` of a run folder, or the file itself; raises UsageError when there is none."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        raise UsageError(f"there is no {file}: name a run folder that ended, or a model.safetensors")
    return file


def read_metrics(run: Path) -> dict[str, Any]:
    """The contents of a run's metrics.json, empty when there is none."""
    try:
        metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return metrics if isinstance(metrics, dict) else {}


def read_curves(run: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv by column, without what was not taken; none where it cannot be read."""
    rows = []
    try:
        with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                with suppress(ValueError, TypeError):  # the line that a running process is writing
                    rows.append({name: float(value) for name, value in row.items() if name and value})
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    return rows
