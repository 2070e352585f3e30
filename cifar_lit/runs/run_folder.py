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
from typing import Any

from filelock import FileLock, Timeout

from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import PART, write_text

LOCK, OWNER = ".lock", ".owner"
JOB = ".job"  # of a scheduler, that a run was started by
PREVIOUS = "checkpoints/previous.ckpt"
CHECKPOINTS = ("checkpoints/last.ckpt", PREVIOUS, "checkpoints/best.ckpt")  # in the order in which a run is gone on from them


class RunFolder:
    """A run's folder, made at the first look at `path`, so that what fails before leaves nothing behind, and locked from then on.

    The lock is filelock's, which the system takes back when the process ends. Beside it lies a record of who holds it, which
    filelock's own file cannot say: whoever tries to lock it empties it.

    Raises Failure when the folder cannot be written, or another process (which is named) is writing it.

    Args:
        logs: The folder of all runs.
        name: The recipe's.
        path: An existing run to go on with instead of a new one.
        first: Whether this is the run's first process; the others never claim a folder, they `follow` it.
        job: What a new folder records of the scheduler's job that it belongs to, so that the job, started again, finds it.
    """

    def __init__(self, logs: Path, name: str, path: Path | None = None, first: bool = True, job: str | None = None) -> None:
        self.logs, self.name, self.resumed = logs, name, path is not None
        self._first, self._job = first, job
        self._path: Path | None = None
        self._lock: FileLock | None = None
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
        return self._path is not None and _newest_checkpoint(self._path).is_file()

    def follow(self, path: Path) -> None:
        """Takes the folder that the first process has claimed."""
        if not self._first:
            self._path = path

    def _claim(self) -> Path:
        form = re.compile(re.escape(self.name) + r"-(\d+)")
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            matches = (form.fullmatch(path.name) for path in self.logs.iterdir())
            number = 1 + max((int(match[1]) for match in matches if match), default=0)
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
        """Locks the folder, after a killed process too; says so where that one ran on another machine."""
        lock = FileLock(path / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            owner = owner_of(path) or "another process"
            raise Failure(f"{owner} is writing {path}: wait until it ends, or start a new run without --resume") from None
        except OSError as error:
            raise Failure(f"cannot lock {path}: {error.strerror}. Choose another place with --logs DIR.") from None
        self._lock, self._path = lock, path
        try:
            before, host = owner_of(path), socket.gethostname()
            if before and not before.endswith(f" on {host}"):  # lost with its machine, or of a file system that shares no locks
                print(f"{path} was left by {before}; going on with it", file=sys.stderr)
            write_text(path / OWNER, f"process {os.getpid()} on {host}\n")
            for partial in path.rglob(f"*{PART}"):  # of a process that was killed while it wrote
                partial.unlink()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets other processes go on with the folder; the lock's traces go with it."""
        if self._lock is not None and self._path is not None and self._lock.is_locked:
            (self._path / OWNER).unlink(missing_ok=True)
            with suppress(OSError):  # before it is given back, or it might be another's; where open files cannot be removed it
                (self._path / LOCK).unlink(missing_ok=True)  # stays
            self._lock.release()


def owner_of(run: Path) -> str | None:
    """Who writes a run folder, or was killed while writing it: `process 41 on node-7`; None after an orderly end."""
    with suppress(OSError, UnicodeDecodeError):
        record = (run / OWNER).read_text(encoding="utf-8").strip()
        return record if re.fullmatch(r"process \d+ on [\w.-]+", record) else None
    return None


def display_path(path: Path) -> str:
    """A path as the user would type it: from the working folder where it lies below."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


# ---- Which run, and whether it can go on.


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, None when it lies elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file() else None


def find_resumable(logs: Path, name: str | None) -> Path:
    """The checkpoint that `--resume` goes on from; raises UsageError when there is none.

    name: a checkpoint, a run folder, or None for the newest run in `logs` that trained.
    """
    if name is None:
        runs = [place.parent for place in logs.glob("*/checkpoints") if (place.parent / "config.yaml").is_file()]
        if not runs:
            raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
        path = max(runs, key=_started)
    else:
        path = Path(name).expanduser()
    checkpoint = _newest_checkpoint(path) if path.is_dir() else path
    if not checkpoint.is_file():
        place = display_path(checkpoint)
        raise UsageError(f"nothing to resume: there is no checkpoint {place}. Name another run, or start one without --resume.")
    return checkpoint


def _started(run: Path) -> int:
    """When a run started or went on, which is when its config.yaml is written: nanoseconds."""
    return (run / "config.yaml").stat().st_mtime_ns


def stamp_start(run: Path) -> None:
    """Dates a run's start, see `_started`, after those of the runs beside it, though the clock may have been set back."""
    with suppress(OSError, OverflowError):  # a run that is gone meanwhile; a file system that takes no such time
        config = run / "config.yaml"
        latest = max((_started(other.parent) for other in run.parent.glob("*/config.yaml") if other != config), default=0)
        if latest >= _started(run):
            os.utime(config, ns=(latest + 2 * 10**9,) * 2)  # some file systems keep even seconds only


def _newest_checkpoint(run: Path) -> Path:
    """The checkpoint of a run that is to be gone on from; where there is none, the place where it would be."""
    places = [run / name for name in CHECKPOINTS]
    return next((place for place in places if place.is_file()), places[0])


def runs_of_job(logs: Path, belongs: Callable[[dict[str, Any]], bool]) -> list[Path]:
    """The trainings in `logs` whose record of a job `belongs` takes, if finished or fit to be gone on with; newest first."""
    runs = []
    for record in logs.glob(f"*/{JOB}"):
        run, job = record.parent, _read_json(record)
        with suppress(OSError):  # gone meanwhile
            if job and belongs(job) and (read_metrics(run) or _newest_checkpoint(run).is_file()):
                runs.append((_started(run), run))
    return [run for _, run in sorted(runs, reverse=True)]


def is_finished(run: Path, needs_test: bool) -> bool:
    """Whether a run has nothing left to do; `needs_test`: the command ends with a test."""
    metrics = read_metrics(run)
    return bool(metrics and (metrics.get("test") or not needs_test))


def check_unfinished(run: Path, needs_test: bool) -> None:
    """Raises UsageError when a run has nothing left to do, see `is_finished`."""
    if is_finished(run, needs_test):
        results = display_path(run / "metrics.json")
        raise UsageError(f"{display_path(run)} is finished: its results are in {results}. Start a new run without --resume.")


# ---- What a run left.


def weights_file(path: str | Path) -> Path:
    """The `model.safetensors` of a run folder, or the file itself; raises UsageError when there is none."""
    file = Path(path).expanduser()
    file = file / "model.safetensors" if file.is_dir() else file
    if not file.is_file():
        raise UsageError(f"there is no {file}: name a run folder that ended, or a model.safetensors")
    return file


def read_metrics(run: Path) -> dict[str, Any]:
    """The contents of a run's metrics.json, empty when there is none."""
    return _read_json(run / "metrics.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a table with a header, without empty cells; none where it cannot be read.

    A last line without an end is left out: it is being written, or a kill or a full disk cut it short.
    """
    try:
        with file.open(newline="", encoding="utf-8") as opened:
            rows = csv.DictReader([line for line in opened if line.endswith("\n")])
            return [{name: value for name, value in row.items() if name and value} for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def read_curves(run: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv by column, without what was not taken; none where it cannot be read."""
    rows = []
    for row in read_rows(run / "metrics.csv"):
        with suppress(ValueError):
            rows.append({name: float(value) for name, value in row.items()})
    return rows
