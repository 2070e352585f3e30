"""Two threads in every rank that detect and name a lost rank, and end this process if its own work cannot continue.

gloo reports a killed rank as "Connection reset by peer" without a name, and neither gloo nor torchrun detects a frozen
rank. DDPStrategy(timeout=…) also covers the wait for the first rank's download, so it cannot be a minute.

Here every rank writes heartbeats and its position to a table in torch's store, which the first rank serves, and reads
the table. A rank that is killed, frozen or cut off from the network writes no heartbeats. A rank whose main thread
hangs does not reach the position where the others wait.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.text import note

LOST, FAILED, STOPPED = "lost", "failed", "stopped"
# Seconds for the main thread to exit by itself, with the error that the loss of a rank causes.
EXIT_SECONDS = {LOST: 3.0, FAILED: 3.0, STOPPED: 15.0}
CLEANUP_SECONDS = 10.0  # grace period for a main thread that is exiting
REQUEUE_SECONDS = 90.0  # grace period after a stop signal, because the process may requeue its job
CHILD_EXIT_SECONDS = 3.0  # grace period for the ranks that this process started
HEARTBEAT_SECONDS = 1.0
JOIN_FACTOR = 5.0  # × limit: time for which ranks wait for each other at the start
HANG_FACTOR = 1.5  # × limit: time for which the main thread of one rank may keep the others waiting
FAULT = "cifar_lit/fault"  # key of the fault that ends the run, the first one reported


class Fault(NamedTuple):
    """Why a run cannot continue."""

    rank: int  # at fault
    kind: str  # key of EXIT_SECONDS
    what: str  # rest of the sentence about the rank, such as "was killed by SIGKILL"
    code: int = 1  # exit code


class Row(NamedTuple):
    """What a rank writes to the table."""

    beats: int
    position: list[int]  # progress of the main thread, see `RankProgress`
    host: str
    process: int
    done: bool


def keys_of(world: int) -> list[str]:
    """Return the keys of the fault and of the row of each rank in the store."""
    return [FAULT, *(f"cifar_lit/rank/{rank}" for rank in range(world))]


class RankWatch:
    """The watch of one rank. limit: seconds without a heartbeat after which a rank counts as lost."""

    def __init__(self, info: RankInfo, limit: float, store: Any) -> None:
        self.info, self.limit, self.store = info, limit, store
        self.heartbeat_seconds = min(HEARTBEAT_SECONDS, limit / 5)
        self.position: list[int] = []
        self.fault: Fault | None = None
        self.fault_known = threading.Event()
        self.main_thread_ends = threading.Event()  # the main thread is exiting by itself
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # ranks that this process has started
        self.advice: Callable[[], str] = lambda: ""  # returns how to resume
        self.release: Callable[[], None] = lambda: None  # called before the process is killed, to unlock the run folder
        self.rows: dict[int, Row] = {}
        # Seconds of watching. This clock stops while the process is suspended: other ranks are not silent then.
        self.now = self.answered = 0.0  # answered: when the store answered last
        self._beats = 0
        self._done = self._closed = self._disconnected = False
        self._line_taken = threading.Lock()  # never released: only one thread prints the message
        self._changed: dict[tuple[str, int], float] = {}  # by what `_unchanged` observes of a rank

    def start(self) -> None:
        """Begin to exchange heartbeats and to watch."""
        for work in (self._exchange, self._watch):
            threading.Thread(target=work, name="rank watch", daemon=True).start()

    def adopt(self, children: Iterable[subprocess.Popen[bytes]]) -> None:
        """Watch the ranks that this process has just started. Their numbers follow its own."""
        self.children = dict(enumerate(children, self.info.rank + 1))

    def finish(self) -> None:
        """Tell the other ranks that this one has finished. The first rank waits for the others: it serves the store."""
        self._done = True
        with suppress(RuntimeError):
            self._write_row()
        deadline = time.monotonic() + CLEANUP_SECONDS
        while self.info.rank == 0 and not all(row.done for row in self.rows.values()) and time.monotonic() < deadline:
            time.sleep(self.heartbeat_seconds / 5)
        self._closed = True

    def fail(self, fault: Fault) -> Fault:
        """Report this rank's fault to the other ranks, and return the fault that ends the run."""
        fault = self._report(fault)
        self._closed = True  # in a notebook, the process continues after the main thread's error
        self.end_children()
        return fault

    def _report(self, fault: Fault) -> Fault:
        """Return the fault that ends the run: the first one that a rank has written to the store."""
        if self.fault is None and not self._is_cut_off():
            with suppress(RuntimeError):  # the store is gone
                fault = Fault(*json.loads(self.store.compare_set(FAULT, "", json.dumps(fault))))
        self.fault = self.fault or fault
        self.fault_known.set()
        return self.fault

    def _exchange(self) -> None:
        """Write this rank's row and read the table until the store is gone. A call blocks while the store is frozen."""
        with suppress(RuntimeError):  # torch's DistError
            while not self._closed:
                self._write_row()
                fault, *rows = self.store.multi_get(keys_of(self.info.world))
                self.answered = self.now
                if fault and not self.fault:
                    self.fault = Fault(*json.loads(fault))
                    self.fault_known.set()
                self.rows = {rank: Row(*json.loads(row)) for rank, row in enumerate(rows) if row}
                time.sleep(self.heartbeat_seconds)
            return
        self._disconnected = True

    def _write_row(self) -> None:
        self._beats += 1
        row = Row(self._beats, self.position, socket.gethostname(), os.getpid(), self._done)
        self.store.set(keys_of(self.info.world)[1 + self.info.rank], json.dumps(row))

    # ---- Detect faults.

    def _watch(self) -> None:
        """Look for faults until there is one, or until the end of the process."""
        rows: dict[int, Row] = {}
        looked = time.monotonic()
        while not self._closed:
            time.sleep(self.heartbeat_seconds / 2)
            elapsed = time.monotonic() - looked
            looked += elapsed
            self.now += min(elapsed, 3 * self.heartbeat_seconds)
            before, rows = rows, self.rows
            fault = self.fault or self.look(before, rows)
            if fault and not self._closed:
                self._end(self._report(fault))

    def _is_cut_off(self) -> bool:
        return self._disconnected or self.now - self.answered > self.limit

    def _unchanged(self, what: str, rank: int, changed: bool) -> float:
        """Return the seconds since something about a rank has changed, or was observed first."""
        if changed:
            self._changed[what, rank] = self.now
        return self.now - self._changed.setdefault((what, rank), self.now)

    def look(self, before: dict[int, Row], rows: dict[int, Row]) -> Fault | None:
        """Return the first fault in a table, given the table at the last look."""
        silence = f"has sent no heartbeat for {self.limit:.0f} s: it is dead or frozen, or its machine is unreachable"
        if self._is_cut_off() and not (0 in rows and rows[0].done):
            return Fault(0, LOST, "is gone: it was killed" if self._disconnected else silence)
        for rank, child in self.children.items():
            # A child that failed by itself has reported its fault.
            if self._unchanged("exit", rank, not child.poll()) > 2 * self.heartbeat_seconds:
                return Fault(rank, LOST, describe_exit(child.returncode))
        furthest = max((row.position for row in rows.values()), default=[])
        for rank in range(self.info.world):
            if rank not in rows:
                # A Trainer starts the ranks of its machine after preparing the data, which may take hours.
                is_expected = rank % self.info.per_node == 0 or rank in self.children
                if self._unchanged("absence", rank, not is_expected) > JOIN_FACTOR * self.limit:
                    return Fault(rank, LOST, f"did not connect within {JOIN_FACTOR * self.limit:.0f} s")
                continue
            row, last = rows[rank], before.get(rank)
            if self._unchanged("row", rank, row != last or row.done) > self.limit:
                return Fault(rank, LOST, silence)
            moves = row.done or row.position == furthest or last is None or row.position != last.position
            if self._unchanged("position", rank, moves) > HANG_FACTOR * self.limit:
                waited = f"has kept the others waiting for {HANG_FACTOR * self.limit:.0f} s"
                return Fault(rank, LOST, f"{waited}: it hangs in a file system, a driver or a deadlock")
        return None

    # ---- End the process.

    def line_about(self, fault: Fault) -> str:
        """Return the message about a fault, once and on the first remaining rank of each machine; otherwise "".

        The message is also empty if the rank at fault has printed its error on this machine.
        """
        here = {rank for rank, row in self.rows.items() if row.host == socket.gethostname()}
        printed = fault.kind == STOPPED or (fault.kind == FAILED and fault.rank in here)
        is_speaker = self.info.rank == min(here - {fault.rank}, default=self.info.rank)
        if not self._line_taken.acquire(blocking=False) or printed or not is_speaker:
            return ""
        row = self.rows.get(fault.rank)
        place = f" (process {row.process} on {row.host})" if row else ""
        return f"cifar-lit: rank {fault.rank}{place} {fault.what}. The run was ended. {self.advice()}".rstrip()

    def _end(self, fault: Fault) -> None:
        """Give the main thread time to exit by itself, then kill the process."""
        if self.main_thread_ends.wait(EXIT_SECONDS[fault.kind]):
            time.sleep(REQUEUE_SECONDS if fault.kind == STOPPED else CLEANUP_SECONDS)
        elif line := self.line_about(fault):
            note(*line.split("\n"))
        with suppress(Exception):
            self.release()
        self.end_children()
        row = self.rows.get(fault.rank)
        if fault.kind == LOST and row and (row.host, row.process) == (socket.gethostname(), os.getppid()):
            os.kill(row.process, signal.SIGKILL)  # a frozen rank that has started this one
        for worker in multiprocessing.active_children():
            worker.kill()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(fault.code)

    def end_children(self) -> None:
        """Wait `CHILD_EXIT_SECONDS` for the ranks that this process has started, then kill them.

        The first rank also waits until the others have read from its store why the run ends.
        """
        if self.info.rank == 0:
            time.sleep(2 * self.heartbeat_seconds)
        deadline = time.monotonic() + CHILD_EXIT_SECONDS
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.children.values():
            child.kill()
            child.wait()


def describe_exit(code: int) -> str:
    """Return the predicate of a message about a process that ended with this return code of `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    return f"was killed by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")
