"""Run folders, `<logs>/<recipe>-<number>`: claim, lock and resume them, and read their files."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import socket
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, LeaseSettingsMismatch, SoftFileLease, Timeout

from cifar_lit.errors import Failure, UsageError
from cifar_lit.files import PART, file_size, read_text, write_text
from cifar_lit.text import note

# Numbers of metrics.json.
FIGURES = ("epochs", "batch_size", "parameters", "train_seconds", "images_per_second", "test_seconds")
MAX_FIGURE = 1e15
LOCK, OWNER = ".lock", ".owner"
MODEL = "model.safetensors"
HUB = "hf://"  # begin of the name of a model on the Hugging Face hub
JOB = ".job"  # scheduler job that started the run
PREVIOUS = "checkpoints/previous.ckpt"
GROUP = "group_"  # begins the columns of groups in predictions.csv
CHECKPOINTS = ("checkpoints/last.ckpt", PREVIOUS, "checkpoints/best.ckpt")  # in order of preference for a resume
WRITTEN = ("config.yaml", "metrics.json", "model.safetensors", "predictions.csv", "probabilities.npy", "report.html",
           "margins.npy")  # fmt: skip
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks
WRITING_SECONDS = 0.2  # time for another process to finish writing a new lease
LEASE_SECONDS = 10.0  # lease duration; an owner on another machine renews it three times in this period
MAX_DEPTH = 50  # folder levels in a resumed run
MAX_TABLE = 64 << 20  # bytes; predictions.csv of 10,000 images and 200 classes has 18 MiB
MAX_LINE = 8 << 20  # characters of a line in it; longer ones are skipped
MAX_CELLS = 4_000_000  # cells and rows that are returned; they take about 500 MB of memory


class RunFolder:
    """A run's folder, created and locked when `path` is first read, so that an earlier failure leaves no folder.

    The operating system releases the lock when the process ends. Some network file systems have no locks, or do not
    share them between machines. So the run also holds filelock's lease, a file with the owner and a heartbeat.

    Args:
        path: existing run to resume, instead of a new one.
        first: whether this is the first process of the run. Other processes do not create a folder, see `follow`.
        job: record of the scheduler job, written to a new folder so that a restarted job finds its run.

    Raise Failure if the folder cannot be written, or another process is writing it.
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
            check_links(path)
            self._hold(path)

    @property
    def path(self) -> Path:
        """The folder. The first process creates it on first access. In other processes it is `logs` before `follow`."""
        if self._path is not None:
            return self._path
        if not self._first:
            return self.logs
        path = self._claim()
        self._hold(path)
        if self._job:
            write_text(path / JOB, self._job)
        return path

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self._path is not None and newest_checkpoint(self._path).is_file()

    def follow(self, path: Path) -> None:
        """Use the folder that the first process has created."""
        if not self._first:
            self._path = path

    def _claim(self) -> Path:
        pattern = re.compile(re.escape(self.name) + r"-(\d+)")
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            number = 1
            for other in self.logs.iterdir():
                if match := pattern.fullmatch(other.name):
                    number = max(number, int(match[1]) + 1)
            while True:
                path = self.logs / f"{self.name}-{number}"
                try:
                    path.mkdir()  # atomic: if two runs start at once, one of them takes the next number
                    return path
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise Failure(
                f"cannot make a run folder in {self.logs}: {error.strerror}. Choose another folder with --logs DIR."
            ) from None

    def _hold(self, path: Path) -> None:
        """Lock the folder, and remove the partial files of a killed process."""
        lock = FileLock(path / LOCK, thread_local=False, fallback_to_soft=False)
        lease = _lease(path)
        try:
            try:
                lock.acquire(timeout=0)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            previous_owner = owner_of(path)
            if lock.is_locked and previous_owner is None and os.path.lexists(path / OWNER):
                time.sleep(WRITING_SECONDS)
                if owner_of(path) is None:  # an unreadable lease can neither be renewed nor expire
                    lease.force_break()
            lease.acquire(timeout=1.5 * LEASE_SECONDS)
        except (Timeout, LeaseSettingsMismatch):
            lock.release()
            owner = owner_of(path) or "another process"
            raise Failure(f"{owner} is writing {path}: wait until it ends, or use another run") from None
        except OSError as error:
            lock.release()
            raise Failure(f"cannot lock {path}: {error.strerror}. Choose another place with --logs DIR.") from None
        self._lock, self._lease, self._path = lock, lease, path
        try:
            if previous_owner and not previous_owner.endswith(f" on {socket.gethostname()}"):
                note(f"{path} was left unfinished by {previous_owner}; resuming it")
            for partial in path.rglob(f"*{PART}"):
                if not partial.is_dir():
                    partial.unlink()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the folder and remove the lock files."""
        lock, self._lock = self._lock, None
        if lock is not None and self._lease is not None and self._path is not None:
            self._lease.release()
            # Remove the file before the release: afterwards another process may hold the lock. The folder may be gone
            # or read-only, and Windows cannot remove open files.
            with suppress(OSError):
                (self._path / LOCK).unlink()
            lock.release()


def _lease(run: Path) -> SoftFileLease:
    return SoftFileLease(run / OWNER, lease_duration=LEASE_SECONDS, thread_local=False)


def owner_of(run: Path) -> str | None:
    """Return the process that holds the lease of a run folder, alive or killed: `process 41 on node-7`, or None."""
    owner = _lease(run).owner
    if owner is None:
        return None
    host = owner.hostname.partition("?")[0]  # filelock appends the container's id
    if not re.fullmatch(r"[\w.-]+", host):
        return None
    return f"process {owner.pid} on {host}"


def display_path(path: Path) -> str:
    """Return a path as the user would type it: relative if it is below the working folder, always with slashes."""
    if path.absolute().is_relative_to(Path.cwd()):
        path = path.absolute().relative_to(Path.cwd())
    return path.as_posix()


# ---- Find the run to resume.


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None."""
    folder = checkpoint.resolve().parent
    if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
        return folder.parent
    return None


def find_resumable(logs: Path, name: str | None, needs_test: bool | None = None, first: bool = True) -> Path:
    """Return the checkpoint that `--resume` continues from.

    Args:
        name: a checkpoint, a run folder, or None for the newest training in `logs`.
        needs_test: with a bool, prefer the newest run that has a checkpoint and is not finished (see `is_finished`),
            and print its name. None takes the newest run in any state.
        first: whether this is the run's first process, which prints.

    Raises:
        UsageError: there is no checkpoint.
        Failure: the run folder is not safe to write to, see `check_files`.
    """
    if name is None:
        path = _newest_run(logs, needs_test, first)
    else:
        path = Path(name).expanduser()
    checkpoint, run = path, run_of(path)
    if path.is_dir():
        checkpoint, run = newest_checkpoint(path), path
    if not checkpoint.is_file():
        raise UsageError(
            f"nothing to resume: there is no checkpoint {display_path(checkpoint)}. "
            "Name another run, or start one without --resume."
        )
    if run is not None:
        check_files(run)
    return checkpoint


def _newest_run(logs: Path, needs_test: bool | None, first: bool) -> Path:
    trained = [folder.parent for folder in logs.glob("*/checkpoints") if (folder.parent / "config.yaml").is_file()]
    if not trained:
        raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
    trained.sort(key=_started, reverse=True)
    newest = trained[0]
    if needs_test is None:
        return newest
    for run in trained:
        if is_finished(run, needs_test) or not newest_checkpoint(run).is_file():
            continue
        if run != newest and first:
            if is_finished(newest, needs_test):
                state = "is finished"
            else:
                state = "has no checkpoint"
            note(f"resuming {display_path(run)}: the newest run, {display_path(newest)}, {state}")
        return run
    return newest


def check_files(run: Path) -> None:
    """Raise Failure if a run folder, which may come from a stranger, is not safe to write to, see `check_links`."""
    curves = run / "metrics.csv"
    for name in WRITTEN:
        if (run / name).is_dir():
            raise Failure(f"{display_path(run / name)} is a folder, where a file is to be written: move it away")
    check_links(run)
    if curves.exists() and not (curves.is_file() and curves.stat().st_size <= MAX_TABLE):
        raise Failure(
            f"{display_path(curves)} is not a file of at most {MAX_TABLE >> 20} MiB: move it away to resume without it"
        )


def check_links(folder: Path) -> None:
    """Raise Failure if a folder, which may come from a stranger, has a symlink pointing outside.

    The folder itself may be a symlink. Call this before an existing folder is written to.
    """
    top = os.path.realpath(folder)
    for parent, folders, files in os.walk(top):
        if len(Path(parent).parts) - len(Path(top).parts) > MAX_DEPTH:
            raise Failure(f"{display_path(folder)} has folders nested deeper than {MAX_DEPTH} levels: move them away")
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(top):
                link = display_path(folder / path.relative_to(top))
                raise Failure(
                    f"{link} is a symlink pointing outside its folder, so nothing is written there: "
                    "replace the symlink with a copy of its target"
                )


def _started(run: Path) -> int:
    """Return when a run was started or resumed: the modification time of its config.yaml in nanoseconds."""
    return (run / "config.yaml").stat().st_mtime_ns


def stamp_start(run: Path) -> None:
    """Make this run the newest one in its folder, even if the clock was set back."""
    with suppress(OSError, OverflowError):  # a run was deleted meanwhile, or the file system cannot store this time
        config = run / "config.yaml"
        others = [_started(other.parent) for other in run.parent.glob("*/config.yaml") if other != config]
        latest = max(others, default=0)
        if latest >= _started(run):
            later = latest + 2 * 10**9  # some file systems only store even seconds
            os.utime(config, ns=(later, later))


def newest_checkpoint(run: Path) -> Path:
    """Return the checkpoint to resume from; the path of last.ckpt if there is none."""
    for name in CHECKPOINTS:
        if (run / name).is_file():
            return run / name
    return run / CHECKPOINTS[0]


def newest_run_of_job(logs: Path, job: str) -> Path | None:
    """Return the newest run, finished or resumable, with this record of its job."""
    runs = []
    for record in logs.glob(f"*/{JOB}"):
        run = record.parent
        if record.read_text() == job and (read_metrics(run) or newest_checkpoint(run).is_file()):
            runs.append((_started(run), run))
    if not runs:
        return None
    return max(runs)[1]


def is_finished(run: Path, needs_test: bool) -> bool:
    """Return whether a run has nothing left to do. needs_test: the command ends with a test."""
    metrics = read_metrics(run)
    return bool(metrics and (metrics.get("test") or not needs_test))


def check_unfinished(run: Path, needs_test: bool) -> None:
    """Raise UsageError if a run is finished, see `is_finished`."""
    if is_finished(run, needs_test):
        results = display_path(run / "metrics.json")
        raise UsageError(
            f"{display_path(run)} is finished: its results are in {results}. Start a new run without --resume."
        )


# ---- Read the files of a run.


def weights_file(path: str | Path) -> Path:
    """Return the `model.safetensors` of a run folder, or the file itself; raise UsageError if there is none."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / MODEL
    if not file.exists():
        raise UsageError(f"there is no {file}: name the folder of a finished run, or a model.safetensors")
    if file.suffix == ".ckpt":
        remedy = "the folder of a finished run"
        run = file.parent.parent
        if (run / MODEL).is_file():
            remedy = display_path(run)
        raise UsageError(f"{file} is a checkpoint: name {remedy} instead")
    return file


def read_metrics(run: Path) -> dict[str, Any]:
    """Return the contents of a run's metrics.json; empty if it is missing or its values have wrong types or ranges."""
    metrics = read_json(run / "metrics.json")
    try:
        for part in ("test", "val"):
            _check_scores(metrics.get(part) or {})
        for name in FIGURES:
            _check_number(metrics.get(name))
        changes_in(metrics.get("changes"))
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    return metrics


def _check_scores(scores: dict[str, Any]) -> None:
    """Raise an error unless all scores that are computed with or formatted have the expected type and range."""
    _check_number(scores.get("loss"))
    _check_number(scores.get("accuracy"), 1.0)
    if not isinstance(scores.get("images", 0), int) or scores.get("images", 0) < 0:
        raise TypeError("a number of images is expected")
    if not isinstance(scores.get("fingerprint") or "", str):
        raise TypeError("text is expected")
    if tta := scores.get("tta"):
        _check_number(tta["accuracy"], 1.0)
        if tta["accuracy"] is None or not isinstance(tta["views"], str):
            raise TypeError("an accuracy and the name of the views are expected")


def _check_number(value: object, most: float | None = None) -> None:
    """Raise an error unless a value is None or a number, and with `most` in 0 … most."""
    if value is None:
        return
    if not isinstance(value, int | float):
        raise TypeError("a number is expected")
    if most is not None and not 0 <= value <= most:
        raise ValueError("a number is out of range")


def changes_in(changes: Any) -> list[dict[str, Any]]:
    """Return the changes of a resumed run, see `runs.run.Run`; raise TypeError or KeyError for other values."""
    if changes is None:
        return []
    for change in changes:
        if not isinstance(change["step"], int) or not isinstance(change["settings"], dict):
            raise TypeError("a change has a step and settings")
    return list(changes)


def changes_text(metrics: Mapping[str, object]) -> str:
    """Return the settings that changed when a run was resumed, such as `from step 60: trainer.devices 2`, or ''."""
    lines = []
    for change in changes_in(metrics.get("changes")):
        settings = [f"{name} {value}" for name, value in change["settings"].items()]
        lines.append(f"from step {change['step']}: {', '.join(settings) or 'as at the start'}")
    return "; ".join(lines)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it cannot be read or one of its numbers is out of range."""
    try:
        content = json.loads(read_text(file))
        if isinstance(content, dict) and _is_bounded(content):
            return content
    except (OSError, ValueError, RecursionError):
        pass
    return {}


def _is_bounded(value: object) -> bool:
    """Return whether all numbers in a JSON value are below `MAX_FIGURE`; false for NaN."""
    if isinstance(value, dict):
        return all(map(_is_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_is_bounded, value))
    if isinstance(value, int | float):
        return abs(value) < MAX_FIGURE
    return True


def read_rows(file: Path, columns: Container[str] | None = None) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header, without empty cells; none if it cannot be read or is too large.

    A line with fewer cells than the header is skipped: it is still being written, or was cut short by a kill or a full
    disk.

    columns: names of the columns to return, all by default.
    """
    rows: list[dict[str, str]] = []
    cells = 0
    try:
        file_size(file, MAX_TABLE)
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.reader(line for line in lines if len(line) <= MAX_LINE)
            header = next(reader, [])
            for values in reader:
                if len(values) < len(header):  # also an empty line
                    continue
                row = {}
                for name, value in zip(header, values, strict=False):
                    if name and value and (columns is None or name in columns):
                        row[name] = value
                rows.append(row)
                cells += 1 + len(row)
                if cells > MAX_CELLS:
                    return []
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    return rows


def read_curves(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv. Rows with text and values that are NaN or out of range are left out."""
    rows = []
    for row in read_rows(run / "metrics.csv"):
        values = {}
        with suppress(ValueError):
            for name, text in row.items():
                if abs(float(text)) < MAX_FIGURE:
                    values[name] = float(text)
            rows.append(values)
    return rows
