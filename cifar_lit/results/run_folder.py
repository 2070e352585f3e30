"""Run folders: `<logs>/<recipe>-<number>`, each claimed by one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cifar_lit.disk import remove_parts, written_whole
from cifar_lit.errors import Failure, UsageError
from cifar_lit.results.lock import RunLock

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
        remove_parts(path)  # of a process that was killed while it wrote

    def release(self) -> None:
        """Lets other processes go on with the folder."""
        if self._lock is not None:
            self._lock.release()


def shown(path: Path) -> str:
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
            f"nothing to resume: there is no checkpoint {shown(checkpoint)}. Name another run, or start one without --resume."
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
        results = shown(run / "metrics.json")
        raise UsageError(f"{shown(run)} is finished: its results are in {results}. Start a new run without --resume.")


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
    with written_whole(path) as partial:
        partial.write_text(text)
