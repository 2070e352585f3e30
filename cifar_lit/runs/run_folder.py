"""Run folders: `<logs>/<recipe>-<number>`, each claimed by one process."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import atomic_write, remove_partial_files

# ---- Who writes a run folder: a lock that the system takes back when its process ends, and a record of that process.
#
# The lock is all that is needed on one machine. Of folders that several machines share, not every file system shares its locks
# too: there the record counts, whose owner renews it every few seconds.

LOCK, OWNER = ".lock", ".owner"
BEAT = 15.0  # seconds after which an owner renews its record
FRESH = 3 * BEAT  # a record that was not renewed for so long is given up
OLD = 20 * BEAT  # so old a record need not be watched: clocks of two machines do not differ by that much


class Owner(NamedTuple):
    """The process that holds a lock, or held it when it was killed. renewed: when it last said so, on the folder's clock."""

    pid: int
    host: str
    renewed: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def owner_of(run: Path) -> Owner | None:
    """Who writes a run folder, or was killed while writing it; None after an orderly end."""
    try:
        found = json.loads((run / OWNER).read_text())
        return Owner(int(found["pid"]), str(found["host"]), (run / OWNER).stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RunLock:
    """The lock of a run folder, held from `acquire` to `release`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = FileLock(run / LOCK, thread_local=False)
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock, after a killed process too; says so where that one ran on another machine.

        Raises Failure, with the owner's process and host, when the folder is being written.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise _in_use(self._run, owner_of(self._run)) from None
        except PermissionError:
            raise
        except OSError as error:
            raise Failure(f"cannot lock {self._run}: {error.strerror}. Choose another place with --logs DIR.") from None
        try:
            self._succeed(owner_of(self._run))
            with atomic_write(self._run / OWNER) as partial:
                partial.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        except BaseException:
            self._lock.release()
            raise
        self._beats = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._beats.start()

    def _succeed(self, before: Owner | None) -> None:
        """Makes sure that the last owner is gone: here it is, as the lock was free; elsewhere its record must be old."""
        if before is None or before.host == socket.gethostname():
            return
        age = time.time() - before.renewed
        if age < OLD:
            print(f"{self._run} was written by {before}: waiting {FRESH:.0f} s to see whether it still is", file=sys.stderr)
            deadline = time.monotonic() + FRESH
            while time.monotonic() < deadline:
                time.sleep(min(1.0, FRESH / 10))
                now = owner_of(self._run)
                if now is None:
                    return
                if now != before:
                    raise _in_use(self._run, now)
        print(f"{self._run} was left by {before}, which gave its last sign {_ago(age)} ago; going on with it", file=sys.stderr)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(OSError):  # the folder may be out of reach for a while
                os.utime(self._run / OWNER)

    def release(self) -> None:
        """Gives the lock back and removes its traces; without a lock nothing happens."""
        if not self._lock.is_locked:
            return
        self._ended.set()
        (self._run / OWNER).unlink(missing_ok=True)
        with suppress(OSError):  # before it is given back, or it might be another's; where open files cannot be removed it stays
            (self._run / LOCK).unlink(missing_ok=True)
        self._lock.release()


def _in_use(run: Path, owner: Owner | None) -> Failure:
    who = str(owner) if owner else "another process"
    return Failure(f"{who} is writing {run}: wait until it ends, or start a new run without --resume")


def _ago(seconds: float) -> str:
    """A length of time in the unit that one would say it in."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


# In the order in which a run is gone on from them.
_, PREVIOUS, _ = CHECKPOINTS = ("checkpoints/last.ckpt", "checkpoints/previous.ckpt", "checkpoints/best.ckpt")
JOB = ".job"  # of a scheduler, that a run was started by


class RunFolder:
    """A run's folder, made at the first look at `path`, so that what fails before leaves nothing behind.

    logs: the folder of all runs. name: the recipe's. path: an existing run to go on with instead of a new one.
    first: whether this is the run's first process; the others never claim a folder, they `follow` it. job: what a new
    folder records of the scheduler's job that it belongs to, so that the job finds it when it is started again.
    Raises Failure when the folder cannot be written, or another process is writing it.
    """

    def __init__(self, logs: Path, name: str, path: Path | None = None, first: bool = True, job: str | None = None) -> None:
        self.logs, self.name = logs, name
        self.resumed = path is not None
        self._path: Path | None = None
        self._lock: RunLock | None = None
        self._first, self._job = first, job
        if path is not None and first:
            self._take(path)

    @property
    def path(self) -> Path:
        """The folder; the first process claims a new number at its first call, others see `logs` until they follow."""
        if self._path is None and self._first:
            self._take(self._claim())
            if self._job and self._path:
                write_text(self._path / JOB, self._job)
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

    def _take(self, path: Path) -> None:
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


def find_resumable(logs: Path, wanted: str | None) -> Path:
    """The checkpoint that `--resume` goes on from.

    wanted: a checkpoint, a run folder, or None for the newest run in `logs` that trained.
    Raises UsageError when there is none, or the run has ended.
    """
    if wanted is None:
        runs = [path.parent for path in logs.glob("*/checkpoints") if (path.parent / "config.yaml").is_file()]
        if not runs:
            raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
        run = max(runs, key=lambda path: (path / "config.yaml").stat().st_mtime_ns)  # written when a run starts or goes on
        checkpoint = _newest(run)
    else:
        given = Path(wanted).expanduser()
        checkpoint = _newest(given) if given.is_dir() else given
    if not checkpoint.is_file():
        raise UsageError(
            f"nothing to resume: there is no checkpoint {display_path(checkpoint)}. "
            "Name another run, or start one without --resume."
        )
    return checkpoint


def _newest(run: Path) -> Path:
    """The checkpoint of a run that is to be gone on from; where there is none, the place where it would be."""
    places = [run / name for name in CHECKPOINTS]
    return next((place for place in places if place.is_file()), places[0])


def is_finished(run: Path, needs_test: bool) -> bool:
    """Whether a run has nothing left to do; `needs_test`: the command ends with a test."""
    metrics = read_metrics(run)
    return bool(metrics and (metrics.get("test") or not needs_test))


def runs_of_job(logs: Path, belongs: Callable[[dict[str, Any]], bool]) -> list[Path]:
    """The trainings in `logs` whose record of a job `belongs` takes, if finished or fit to be gone on with; newest first."""
    found = []
    for record in logs.glob(f"*/{JOB}"):
        run = record.parent
        with suppress(OSError, ValueError, RecursionError):  # no such record: then it is no job's
            job = json.loads(record.read_text())
            if isinstance(job, dict) and belongs(job) and (read_metrics(run) or _newest(run).is_file()):
                found.append(((run / "config.yaml").stat().st_mtime_ns, run))
    return [run for _, run in sorted(found, reverse=True)]


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
        found = json.loads((run / "metrics.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole: readers see the old one or the new one, never a part."""
    with atomic_write(path) as partial:
        partial.write_text(text)
