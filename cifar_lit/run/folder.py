"""Run folders, `<logs>/<recipe>-<number>`: claim and lock them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cifar_lit.base.errors import Failure
from cifar_lit.base.files import PART, write_text
from cifar_lit.run.resume import JOB, newest_checkpoint, run_of

LOCK = ".lock"


class RunFolder:
    """A run's folder: a new one, or an existing one that is locked and resumed.

    The operating system releases the lock when the process ends.

    Args:
        path: existing run to resume, instead of a new one.
        first: whether this is the first process of the run. Other processes do not create a folder, see `follow`.
        job: record of the scheduler job, written to a new folder so that a restarted job finds its run.

    Attributes:
        path: the folder; `logs` before it is claimed.
        tested: checkpoint whose weights are tested, and the epoch and step that it was saved in; see metrics.json.

    Raises:
        Failure: another process is writing the folder.
    """

    def __init__(
        self, logs: Path, name: str, path: Path | None = None, first: bool = True, job: str | None = None
    ) -> None:
        self.logs, self.name, self.resumed = logs, name, path is not None
        self._first, self._job = first, job
        self.path = logs
        self.tested: dict[str, Any] = {}
        self._lock: FileLock | None = None
        if path is not None and first:
            self._hold(path)

    def claim(self) -> Path:
        """Create and lock a new folder, unless it has been claimed. Return the folder.

        Raises:
            Failure: the folder cannot be written.
        """
        if self.path == self.logs:
            self._hold(self._create())
            if self._job:
                write_text(self.path / JOB, self._job)
        return self.path

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from. A folder that was deleted may have one, but no config.yaml."""
        checkpoint = newest_checkpoint(self.path)
        return checkpoint.is_file() and run_of(checkpoint) is not None

    def test_weights(self, path: str | Path, checkpoint: Mapping[str, Any]) -> None:
        """Record the checkpoint whose weights are tested, in epoch 0 before the first step."""
        step, epoch = checkpoint.get("global_step", 0), 0
        if step:
            epoch = checkpoint["epoch"] + 1
        self.tested = {"checkpoint": Path(path).name, "epoch": epoch, "step": step}

    def follow(self, path: Path) -> None:
        """Use the folder that the first process has created."""
        if not self._first:
            self.path = path

    def _create(self) -> Path:
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
        self._lock, self.path = lock, path
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
