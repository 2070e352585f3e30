"""Run folders, `<logs>/<recipe>-<number>`: claim, lock and resume them, and read their files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.base.files import PART, write_text
from cifar_lit.base.text import note

LOCK = ".lock"
MODEL = "model.safetensors"
HUB = "hf://"  # begin of the name of a model on the Hugging Face hub
JOB = ".job"  # scheduler job that started the run
PREVIOUS = "checkpoints/previous.ckpt"
GROUP = "group_"  # begins the columns of groups in predictions.csv
CHECKPOINTS = ("checkpoints/last.ckpt", PREVIOUS, "checkpoints/best.ckpt")  # in order of preference for a resume


class RunFolder:
    """A run's folder, created and locked when `path` is first read, so that an earlier failure leaves no folder.

    The operating system releases the lock when the process ends.

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
        if path is not None and first:
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
        lock = FileLock(path / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise Failure(f"another process is writing {path}: wait until it ends, or use another run") from None
        self._lock, self._path = lock, path
        for partial in path.rglob(f"*{PART}"):
            partial.unlink()

    def release(self) -> None:
        """Unlock the folder and remove the lock file."""
        lock, self._lock = self._lock, None
        if lock is not None:
            # Remove the file before the release: afterwards another process may hold the lock. The folder may be gone
            # or read-only, and Windows cannot remove open files.
            with suppress(OSError):
                Path(lock.lock_file).unlink()
            lock.release()


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


def find_resumable(logs: Path, name: str, needs_test: bool, first: bool = True) -> Path:
    """Return the checkpoint that `--resume` continues from.

    Args:
        name: a checkpoint, a run folder, or "" for the newest training in `logs` that has a checkpoint and is not
            finished, if there is one.
        needs_test: see `is_finished`.
        first: whether this is the run's first process, which prints a note.

    Raises:
        UsageError: there is no checkpoint.
    """
    path = Path(name).expanduser()
    if not name:
        path = _newest_run(logs, needs_test, first)
    checkpoint = path
    if path.is_dir():
        checkpoint = newest_checkpoint(path)
    if not checkpoint.is_file():
        raise UsageError(
            f"nothing to resume: there is no checkpoint {display_path(checkpoint)}. "
            "Name another run, or start one without --resume."
        )
    return checkpoint


def _newest_run(logs: Path, needs_test: bool, first: bool) -> Path:
    trained = [folder.parent for folder in logs.glob("*/checkpoints") if (folder.parent / "config.yaml").is_file()]
    if not trained:
        raise UsageError(f"nothing to resume: {logs} holds no run with checkpoints. Start one without --resume.")
    trained.sort(key=_started, reverse=True)
    newest = trained[0]
    for run in trained:
        if is_finished(run, needs_test) or not newest_checkpoint(run).is_file():
            continue
        if run != newest and first:
            reason = "is finished or has no checkpoint"
            note(f"resuming {display_path(run)}: the newest run, {display_path(newest)}, {reason}")
        return run
    return newest


def _started(run: Path) -> float:
    """Return when a run was started or resumed: the modification time of its config.yaml."""
    return (run / "config.yaml").stat().st_mtime


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
        if record.read_text() != job:
            continue
        if read_metrics(run) or newest_checkpoint(run).is_file():
            runs.append((_started(run), run))
    if not runs:
        return None
    return max(runs)[1]


def is_finished(run: Path, needs_test: bool) -> bool:
    """Return whether a run has nothing left to do. needs_test: the command ends with a test."""
    metrics = read_metrics(run)
    if needs_test:
        return bool(scores_of(metrics))
    return bool(metrics)


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
    """Return the contents of a run's metrics.json, empty before the run is finished."""
    return read_json(run / "metrics.json")


def scores_of(metrics: Mapping[str, Any], part: str = "test") -> dict[str, Any]:
    """Return the scores of a part in metrics.json, empty if it was not scored."""
    return metrics.get(part) or {}


def changes_text(metrics: Mapping[str, Any]) -> str:
    """Return the settings that changed when a run was resumed, such as `from step 60: trainer.devices 2`, or ''."""
    lines = []
    for change in metrics.get("changes", []):
        text = ", ".join(f"{name} {value}" for name, value in change["settings"].items())
        if not text:
            text = "as at the start"
        lines.append(f"from step {change['step']}: {text}")
    return "; ".join(lines)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if it is missing or damaged."""
    content: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
    return content


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header, without empty cells; none without the file.

    A line with fewer cells than the header is skipped: it is still being written, or was cut short by a kill or a full
    disk.
    """
    if not file.is_file():
        return []
    rows = []
    with file.open(encoding="utf-8", newline="") as lines:
        for cells in csv.DictReader(lines):
            if None not in cells.values():
                rows.append({name: value for name, value in cells.items() if value})
    return rows


def read_curves(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv."""
    rows = []
    for row in read_rows(run / "metrics.csv"):
        rows.append({name: float(text) for name, text in row.items()})
    return rows
