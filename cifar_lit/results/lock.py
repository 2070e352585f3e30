"""Who writes a run folder: a lock that the system takes back when its process ends, and a record of that process.

The lock is all that is needed on one machine. Of folders that several machines share, not every file system shares its locks
too: there the record counts, whose owner renews it every few seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from cifar_lit.disk import written_whole
from cifar_lit.errors import Failure

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
            with written_whole(self._run / OWNER) as partial:
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
