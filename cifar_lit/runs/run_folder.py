"""Run folders: `<logs>/<recipe>-<number>`, each claimed and locked by one process, and what is read of them."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, LeaseSettingsMismatch, SoftFileLease, Timeout

from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import PART, read_text, write_text
from cifar_lit.text import note

FIGURES = (
    "epochs",
    "batch_size",
    "parameters",
    "train_seconds",
    "images_per_second",
)  # in metrics.json, beside the scores
MAX_FIGURE = 1e15  # which NaN is not below
LOCK, OWNER = ".lock", ".owner"
JOB = ".job"  # of a scheduler, that a run was started by
PREVIOUS = "checkpoints/previous.ckpt"
CHECKPOINTS = (
    "checkpoints/last.ckpt",
    PREVIOUS,
    "checkpoints/best.ckpt",
)  # in the order in which a run is gone on from them
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what file systems without locks answer
WRITING_SECONDS = 0.2  # in which a record is written that was empty
LEASE_SECONDS = (
    10.0  # without a sign of life, of which there are three in this time, a run's owner on another machine is gone
)
MAX_DEPTH = 50  # levels of folders in a run that is resumed
MAX_TABLE = 64 << 20  # bytes; predictions.csv of 10,000 images and 200 classes has 18 MiB


class RunFolder:
    """A run's folder, made at the first look at `path`, so that what fails before leaves nothing behind, and locked from then on.

    The lock is the system's, which takes it back when the process ends. As some network file systems have no locks, or give them
    to a process on each machine, filelock's lease lies beside it: a record of who writes the run, with signs of life.

    Raises Failure when the folder cannot be written, or another process (which is named) is writing it.

    Args:
        logs: The folder of all runs.
        name: The recipe's.
        path: An existing run to go on with instead of a new one.
        first: Whether this is the run's first process; the others never claim a folder, they `follow` it.
        job: What a new folder records of the scheduler's job that it belongs to, so that the job, started again, finds it.
    """

    def __init__(
        self, logs: Path, name: str, path: Path | None = None, first: bool = True, job: str | None = None
    ) -> None:
        self.logs, self.name, self.resumed = logs, name, path is not None
        self._first, self._job = first, job
        self._path: Path | None = None
        self._lock: FileLock | None = None
        self._lease: SoftFileLease | None = None
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
            raise Failure(
                f"cannot make a run folder in {self.logs}: {error.strerror}. Choose another with --logs DIR."
            ) from None

    def _hold(self, path: Path) -> None:
        """Locks the folder, after a killed process too; says so where that one ran on another machine."""
        lock, lease = FileLock(path / LOCK, thread_local=False, fallback_to_soft=False), _lease(path)
        try:
            try:
                lock.acquire(timeout=0)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            before = owner_of(path)
            if lock.is_locked and before is None and _names_nobody(path):
                lease.force_break()  # no sign could come of nobody
            lease.acquire(timeout=1.5 * LEASE_SECONDS)
        except (Timeout, LeaseSettingsMismatch):
            lock.release()
            owner = owner_of(path) or "another process"
            raise Failure(
                f"{owner} is writing {path}: wait until it ends, or start a new run without --resume"
            ) from None
        except OSError as error:
            lock.release()
            raise Failure(f"cannot lock {path}: {error.strerror}. Choose another place with --logs DIR.") from None
        self._lock, self._lease, self._path = lock, lease, path
        try:
            if before and not before.endswith(f" on {socket.gethostname()}"):
                note(f"{path} was left by {before}; going on with it")
            for partial in path.rglob(f"*{PART}"):  # of a process that was killed while it wrote
                if not partial.is_dir():
                    partial.unlink()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets other processes go on with the folder; the lock's traces go with it."""
        lock, self._lock = self._lock, None
        if lock is not None and self._lease is not None and self._path is not None:
            self._lease.release()
            with suppress(
                OSError
            ):  # before it is given back, or it might be another's; the folder may be gone or read-only, and
                (self._path / LOCK).unlink()  # some systems do not remove open files
            lock.release()


def _names_nobody(run: Path) -> bool:
    """Whether a record is there that cannot be read, and is not just being written by another process."""

    def state() -> tuple[int, ...] | None:
        with suppress(OSError):  # it is not there, or not any more
            record = (run / OWNER).lstat()
            return record.st_ino, record.st_size, record.st_mtime_ns
        return None

    first = state()
    if first is not None:
        time.sleep(WRITING_SECONDS)
    return first is not None and owner_of(run) is None and state() == first


def _lease(run: Path) -> SoftFileLease:
    return SoftFileLease(run / OWNER, lease_duration=LEASE_SECONDS, thread_local=False)


def owner_of(run: Path) -> str | None:
    """Who writes a run folder, or was killed while writing it: `process 41 on node-7`; None after an orderly end."""
    owner = _lease(run).owner
    host = owner.hostname.partition("?")[0] if owner else ""  # behind it filelock marks a container
    return f"process {owner.pid} on {host}" if owner and re.fullmatch(r"[\w.-]+", host) else None


def display_path(path: Path) -> str:
    """A path as the user would type it: from the working folder where it lies below."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


# ---- Which run, and whether it can go on.


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, None when it lies elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file() else None


def find_resumable(logs: Path, name: str | None, needs_test: bool | None = None, first: bool = True) -> Path:
    """Return the checkpoint that `--resume` continues from; raise UsageError if there is none.

    Args:
        logs: The folder of all runs.
        name: A checkpoint, a run folder, or None for the newest run in `logs` that trained.
        needs_test: As of `is_finished`: prefer the newest run that is unfinished and has a checkpoint, and say so. None takes
            the newest run.
        first: Whether this is the run's first process, which prints.
    """
    if name is None:
        trained = [place.parent for place in logs.glob("*/checkpoints") if (place.parent / "config.yaml").is_file()]
        runs = sorted(trained, key=_started, reverse=True)
        if not runs:
            raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
        path = runs[0]
        if needs_test is not None:
            unfinished = (run for run in runs if not is_finished(run, needs_test) and _newest_checkpoint(run).is_file())
            path = next(unfinished, runs[0])
        if path != runs[0] and first:
            state = "is finished" if is_finished(runs[0], bool(needs_test)) else "has no checkpoint"
            note(f"resuming {display_path(path)}: the newest run, {display_path(runs[0])}, {state}")
    else:
        path = Path(name).expanduser()
    checkpoint = _newest_checkpoint(path) if path.is_dir() else path
    if not checkpoint.is_file():
        place = display_path(checkpoint)
        raise UsageError(
            f"nothing to resume: there is no checkpoint {place}. Name another run, or start one without --resume."
        )
    if run := path if path.is_dir() else run_of(path):
        check_files(run)
    return checkpoint


def check_files(run: Path) -> None:
    """Raises Failure for a run that cannot be gone on with in its folder, as a stranger may have made it.

    A link that leads out of it would be written through; the folder itself may be one. The curves must be such as are read, as
    they are written anew; what is another file's second name is left alone by that.
    """
    top, curves = os.path.realpath(run), run / "metrics.csv"
    for name in (
        "config.yaml",
        "metrics.json",
        "model.safetensors",
        "predictions.csv",
        "probabilities.npy",
        "report.html",
    ):
        if (run / name).is_dir():
            raise Failure(f"{display_path(run / name)} is a folder, where a file is to be written: move it away")
    for folder, folders, files in os.walk(top):  # links are not followed
        if len(Path(folder).parts) - len(Path(top).parts) > MAX_DEPTH:
            raise Failure(f"{display_path(run)} has folders nested deeper than {MAX_DEPTH} levels: move them away")
        for place in (Path(folder, name) for name in (*folders, *files)):
            if place.is_symlink() and not Path(os.path.realpath(place)).is_relative_to(top):
                link = display_path(run / place.relative_to(top))
                raise Failure(
                    f"{link} is a link that leads out of its run, which is not gone on with: put in what it leads to"
                )
    if curves.exists() and not (curves.is_file() and curves.stat().st_size <= MAX_TABLE):
        raise Failure(
            f"{display_path(curves)} is not a file of at most {MAX_TABLE >> 20} MiB: move it away to go on without it"
        )


def _started(run: Path) -> int:
    """When a run started or went on, which is when its config.yaml is written: nanoseconds."""
    return (run / "config.yaml").stat().st_mtime_ns


def stamp_start(run: Path) -> None:
    """Dates a run's start, see `_started`, after those of the runs beside it, though the clock may have been set back."""
    with suppress(OSError, OverflowError):  # a run that is gone meanwhile; a file system that takes no such time
        config = run / "config.yaml"
        latest = max(
            (_started(other.parent) for other in run.parent.glob("*/config.yaml") if other != config), default=0
        )
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
        raise UsageError(
            f"{display_path(run)} is finished: its results are in {results}. Start a new run without --resume."
        )


# ---- What a run left.


def weights_file(path: str | Path) -> Path:
    """Return the `model.safetensors` of a run folder, or the file itself; raise UsageError if there is none."""
    file = Path(path).expanduser()
    file = file / "model.safetensors" if file.is_dir() else file
    if not file.exists():
        raise UsageError(f"there is no {file}: name a run folder that ended, or a model.safetensors")
    if file.suffix == ".ckpt":
        run = file.parent.parent
        known = (run / "model.safetensors").is_file()
        raise UsageError(
            f"{file} is a checkpoint: name {display_path(run) if known else 'the folder of a run that ended'} instead"
        )
    return file


def read_metrics(run: Path) -> dict[str, Any]:
    """The contents of a run's metrics.json, empty when there is none, or its figures are none that a run can have."""
    metrics = _read_json(run / "metrics.json")
    return metrics if _countable(metrics) else {}


def _countable(metrics: Mapping[str, Any]) -> bool:
    """Whether figures of a metrics.json, which may come from anyone, can be counted with and shown."""
    try:
        parts = [metrics.get(name) or {} for name in ("test", "val")]
        views = [part["tta"] for part in parts if part.get("tta")]
        figures = [metrics.get(name) for name in FIGURES] + [part.get("loss") for part in parts]
        figures += [value for part in parts for value in part.values() if isinstance(value, int | float)]
        accuracies = [part["accuracy"] for part in parts if part.get("accuracy") is not None]
        accuracies += [view["accuracy"] for view in views]
        images, texts = (
            parts[0].get("images", 0),
            [parts[0].get("fingerprint") or "", *(view["views"] for view in views)],
        )
        return (
            all(abs(figure) < MAX_FIGURE for figure in figures if figure is not None)
            and all(0 <= accuracy <= 1 for accuracy in accuracies)
            and isinstance(images, int)
            and images >= 0
            and all(isinstance(text, str) for text in texts)
        )
    except (AttributeError, KeyError, TypeError):  # something else in the place of a part, or of a number
        return False


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if it cannot be read or one of its numbers is out of range."""
    try:
        content = json.loads(
            read_text(file), parse_int=_bounded_int, parse_float=_bounded_float, parse_constant=_bounded_float
        )
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _bounded_float(text: str) -> float:
    """Return the number; raise ValueError for NaN and numbers of `MAX_FIGURE` or more."""
    value = float(text)
    if not abs(value) < MAX_FIGURE:
        raise ValueError(f"{text[:20]} is out of range")
    return value


def _bounded_int(text: str) -> int:
    _bounded_float(text)
    return int(text)


def read_rows(file: Path, columns: Container[str] | None = None) -> list[dict[str, str]]:
    """Return the rows of a table with a header, without empty cells; none if it cannot be read.

    A last line without an end is left out: it is still being written, or was cut short by a kill or a full disk.

    columns: the names of the columns to keep, all by default.
    """
    try:
        lines = io.StringIO(read_text(file, MAX_TABLE), newline="")
        rows = csv.DictReader(line for line in lines if line.endswith("\n"))
        return [
            {name: value for name, value in row.items() if name and value and (columns is None or name in columns)}
            for row in rows
        ]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def read_curves(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv by column; none if the file cannot be read.

    Rows with text in place of a number are left out, and so are single values that are NaN or out of range.
    """
    rows = []
    for row in read_rows(run / "metrics.csv"):
        with suppress(ValueError):
            values = {name: float(value) for name, value in row.items()}
            rows.append({name: value for name, value in values.items() if abs(value) < MAX_FIGURE})
    return rows
