"""Processes that are ended at a limit, with all that they have started: what hangs or crashes there reaches no one else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, NamedTuple

MOST = 10  # times the limit that a process may take, however much it has to say
LAST_WAIT = 5.0  # seconds for a process to go when it is killed; one that waits in a driver may never go
LOOK = 0.02  # seconds between two looks at who has ended
Said = dict[str, Any]


class Answer(NamedTuple):
    """What became of a process.

    said: the JSON objects that it, and what it started, printed, a line each. code: its exit code, negative for the signal
    that it died of; None when it had to be ended as it fell silent. seconds: how long it ran. error: the last line on stderr.
    """

    said: list[Said]
    code: int | None
    seconds: float
    error: str


def together(commands: Sequence[Sequence[str]], limit: float, environment: Mapping[str, str]) -> list[Answer]:
    """Runs command lines at the same time, each in a process group of its own, and ends those that print nothing for `limit`.

    limit: in seconds. A process that watches its standard input sees it end when this one dies.
    """
    with ExitStack() as stack:
        started = []
        for command in commands:
            process = _Process(command, environment)
            stack.callback(process.end)
            started.append(process)
        running = started
        while running := [process for process in running if not process.has_ended() and not process.is_silent(limit)]:
            time.sleep(LOOK)
        for process in started:
            process.end()
        return [process.answer() for process in started]


class _Process:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # files, as pipes would fill; `answer` closes them
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._started = self._heard = time.monotonic()
        self._size = 0  # of what it has printed, at `_heard`
        self._seconds: float | None = None  # until it ended by itself
        self._over = False
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=self._out, stderr=self._err, start_new_session=True
        )

    def has_ended(self) -> bool:
        if self._seconds is None and self._process.poll() is not None:
            self._seconds = time.monotonic() - self._started
        return self._seconds is not None

    def is_silent(self, limit: float) -> bool:
        now, size = time.monotonic(), os.fstat(self._out.fileno()).st_size
        if size > self._size:
            self._size, self._heard = size, now
        return now - self._heard > limit or now - self._started > MOST * limit

    def end(self) -> None:
        """Kills the group, of which members may be left even if the process itself has ended."""
        if self._over:
            return
        self._over = True
        self.has_ended()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WAIT)

    def answer(self) -> Answer:
        late = self._seconds is None
        seconds = time.monotonic() - self._started if self._seconds is None else self._seconds
        errors = _lines(self._err)
        said = [found for line in _lines(self._out) if (found := _object(line)) is not None]
        return Answer(said, None if late else self._process.returncode, seconds, errors[-1] if errors else "")


def _lines(file: IO[bytes]) -> list[str]:
    with file:
        file.seek(0)
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _object(line: str) -> Said | None:
    """The JSON object of a line; None for what a library has printed."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
