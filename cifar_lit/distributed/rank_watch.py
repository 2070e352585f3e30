"""A thread in every rank that detects and names a lost rank, and ends this process if its own work cannot continue.

Measured with two ranks over gloo: if one is killed, the other gets "Connection reset by peer" without a rank. If one is
frozen or hangs, DDPStrategy(timeout=…) raises without a name and leaves the frozen process. That timeout also covers
the wait for the first rank's download or checkpoint, so its 30 minutes cannot become 60 s. torchrun detects no frozen
rank, and torch's store reports no lost client.

Here every rank holds a connection to the first. The operating system closes it at once when a process dies. A rank that
is frozen or cut off from the network sends no heartbeats. A rank whose main thread hangs does not reach the step where
the others wait.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.errors import UsageError
from cifar_lit.text import note

GONE, ORPHANED, FAILED, SILENT, STUCK, STOPPED = "gone", "orphaned", "failed", "silent", "stuck", "stopped"
# Seconds for the main thread to exit by itself, with the error that a lost rank causes. A frozen rank causes no error.
EXIT_SECONDS = {GONE: 3.0, ORPHANED: 3.0, FAILED: 3.0, SILENT: 0.0, STUCK: 0.0, STOPPED: 15.0}
CLEANUP_SECONDS = 10.0  # grace period for a main thread that is exiting
REQUEUE_SECONDS = 90.0  # grace period after a stop signal, because the process may requeue its job
CHILD_EXIT_SECONDS = 3.0  # grace period for the ranks that this process started
REPLY_SECONDS = 1.0  # wait for the first rank's reply to a fault, or for the exit code of a disconnected rank
HEARTBEAT_SECONDS = 1.0
JOIN_FACTOR = 5.0  # × limit: time for which ranks wait for each other at the start
HANG_FACTOR = 1.5  # × limit: time for which the main thread of one rank may keep the others waiting
ANNOUNCE_SECONDS = 15.0  # until the first rank prints which ranks are missing
MAX_MESSAGE_BYTES = 1 << 20

# A small process beside each rank kills it when it is frozen. A rank that was stopped (SIGSTOP), or waits forever in a
# driver or a file system, runs none of its threads. No other machine can kill it. The watchdog counts heartbeats, not
# time, so that it stands still when a terminal or a scheduler suspends the whole run. First it asks for the
# stacks with SIGUSR2, which also a rank handles that hangs in C code and keeps Python's lock.
WATCHDOG = """
import os, select, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
rank, heartbeat, allowed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
missed = 0
while missed < allowed and os.getppid() == rank:
    if select.select([0], [], [], heartbeat)[0]:
        if not os.read(0, 4096):
            sys.exit()
        missed = 0
    else:
        missed += 1
if os.getppid() == rank:
    os.kill(rank, signal.SIGUSR2)
    time.sleep(1)
    os.kill(rank, signal.SIGKILL)
"""


class Fault(NamedTuple):
    """Why a run cannot continue."""

    rank: int  # at fault
    kind: str  # key of EXIT_SECONDS
    what: str  # rest of the sentence about the rank, such as "is gone"
    code: int = 1  # exit code


class JsonSocket:
    """JSON objects, one per line, over a connected socket that never blocks."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.closed = False  # whether the peer has disconnected, or is not a rank
        self._received = b""
        self._unsent = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, object]) -> None:
        """Send a message, or as much of it as fits; the remainder is sent with the next message."""
        with self._sending, suppress(OSError):  # `receive` detects a closed connection
            self._unsent += json.dumps(message).encode() + b"\n"
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages received, and set `closed` if they are the last."""
        try:
            while (chunk := self.socket.recv(65536)) and len(self._received) <= MAX_MESSAGE_BYTES:
                self._received += chunk
            self.closed = True
        except OSError as error:
            self.closed = not isinstance(error, BlockingIOError)
        *lines, self._received = self._received.split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):  # not a rank
            self.closed = True
            return []


class RankWatch(threading.Thread):
    """Common part of the watches of all ranks. limit: seconds without a heartbeat after which a rank counts as lost."""

    def __init__(self, info: RankInfo, limit: float) -> None:
        super().__init__(name="rank watch", daemon=True)
        self.info, self.limit = info, limit
        self.heartbeat_seconds = min(HEARTBEAT_SECONDS, limit / 5)
        self.machine = host = socket.gethostname()  # identifies the process-id namespace
        with suppress(OSError):  # Linux: containers may share the host name, but not the namespace
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
            namespace = Path("/proc/self/ns/pid").readlink()
            self.machine += f" {boot.strip()} {namespace}"
        self.members = {info.rank: [f"rank {info.rank} (process {os.getpid()} on {host})", self.machine]}
        self.position: list[int] = []  # progress of the main thread, see `RankProgress`
        self.fault: Fault | None = None
        self.fault_known = threading.Event()
        self.main_thread_ends = threading.Event()  # the main thread is exiting by itself
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # ranks that this process has started
        self.children_started = 0.0  # in seconds of `now`
        self.advice: Callable[[], str] = lambda: ""  # returns how to resume
        self.folder: Path | None = None  # run folder, for the stacks of a rank that hangs
        self.release: Callable[[], None] = lambda: None  # called before the process is killed, to unlock the run folder
        self.store_port = 0  # port of torch's store for the process group, served by the first rank
        self.connections: dict[int, JsonSocket] = {}
        self._selector = selectors.DefaultSelector()  # each key's `data` is the callback for a readable socket
        self._last_heard: dict[int, float] = {}
        self._positions: dict[int, list[int]] = {}
        self._closed = False
        self._fault_lock = threading.Lock()
        self._line_taken = threading.Lock()  # never released: only one thread prints the message
        # Seconds of watching. This clock stops while the process is suspended: other ranks are not silent then.
        self.now = 0.0
        self._last_heartbeat = -limit
        self._looked = time.monotonic()
        self._watchdog: IO[bytes] | None = None

    def adopt(self, children: Iterable[subprocess.Popen[bytes]]) -> None:
        """Watch the ranks that this process has just started. Their numbers follow its own."""
        self.children_started = self.now
        self.children = dict(enumerate(children, self.info.rank + 1))

    def run(self) -> None:
        """Watch until a fault or the end of the process. An error in the watch itself does not end the run."""
        self._start_watchdog()
        try:
            while not self._closed:
                fault = self.fault or self._look()
                if fault and not self._closed:
                    self._end(self._settle(fault))
        finally:
            self.close()

    def _start_watchdog(self) -> None:
        if sys.platform == "win32":  # no signal suspends a process, and there is no SIGUSR2
            return
        faulthandler.register(signal.SIGUSR2, file=2)  # written without Python's lock, which a frozen rank may hold
        missed = round((self.limit + 2.0) / self.heartbeat_seconds)  # after the others have reported this rank
        argv = [sys.executable, "-I", "-S", "-c", WATCHDOG, *map(str, (os.getpid(), self.heartbeat_seconds, missed))]
        with suppress(OSError):  # a run works without a watchdog
            null = subprocess.DEVNULL
            self._watchdog = subprocess.Popen(argv, bufsize=0, stdin=subprocess.PIPE, stdout=null, stderr=null).stdin
            assert self._watchdog is not None  # the watchdog exits when this pipe is closed
            os.set_blocking(self._watchdog.fileno(), False)

    def finish(self) -> None:
        """Tell the other ranks that this one has finished."""
        self.close()
        self._send_all({"done": True})

    def fail(self, fault: Fault) -> Fault:
        """Report this rank's fault to the other ranks, and return the fault that ends the run, chosen by rank 0."""
        if self.info.rank == 0:
            self.close()  # in a notebook, the process continues after the main thread's error
            self._settle(fault)
        else:
            self._send_all({"fault": fault})
            self.fault_known.wait(REPLY_SECONDS)
        self.end_children()
        return self.fault or fault

    def _settle(self, fault: Fault) -> Fault:
        """Return the fault that ends this rank: the first one reported. Send it to ranks that may not detect it."""
        with self._fault_lock:
            if self.fault is None and (self.info.rank == 0 or fault.rank in self.children):
                self._send_all({"fault": fault})
            self.fault = self.fault or fault
        self.fault_known.set()
        return self.fault

    def _send_all(self, message: dict[str, object]) -> None:
        for connection in list(self.connections.values()):
            connection.send(message)

    # ---- Detect faults.

    def _look(self) -> Fault | None:
        """Wait half a heartbeat for messages, send a heartbeat if it is due, and return the first fault detected."""
        for key, _ in self._selector.select(self.heartbeat_seconds / 2):
            if fault := key.data():
                return fault
        elapsed = time.monotonic() - self._looked
        self._looked += elapsed
        self.now += min(elapsed, 3 * self.heartbeat_seconds)
        if self.now - self._last_heartbeat >= self.heartbeat_seconds:
            self._last_heartbeat = self.now
            with suppress(OSError, ValueError):  # ValueError: closed by the main thread
                if self._watchdog:
                    self._watchdog.write(b".")
            self._send_all({"position": self.position})
        if self.info.parent is not None and os.getppid() != self.info.parent:
            return Fault(self.info.rank, ORPHANED, "has lost the torchrun that started it")
        what = f"has sent no heartbeat for {self.limit:.0f} s: it is frozen, or its machine is unreachable"
        silent = (rank for rank, heard in self._last_heard.items() if self.now - heard > self.limit)
        return self._lost_child() or next((Fault(rank, SILENT, what) for rank in silent), None)

    def _listen_to(self, rank: int, connection: JsonSocket) -> None:
        self.connections[rank], self._last_heard[rank] = connection, self.now
        self._selector.register(connection.socket, selectors.EVENT_READ, partial(self._read, rank))

    def _read(self, rank: int) -> Fault | None:
        """Process a rank's messages: its position, its fault, its end and, from the first rank, the members."""
        connection = self.connections[rank]
        self._last_heard[rank] = self.now
        done = False
        for message in connection.receive():
            if "fault" in message:
                return Fault(*message["fault"])
            if "members" in message:
                self.members = {int(member): names for member, names in message["members"].items()}
                self.store_port = message["store_port"]
            self._positions[rank] = message.get("position", [])
            done = done or "done" in message
        if not done and (self._closed or not connection.closed):
            return None
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self.connections[rank], self._last_heard[rank]
        self._positions.pop(rank, None)
        if done:
            return None
        with suppress(KeyError, subprocess.TimeoutExpired):  # KeyError: not started by this process
            self.children[rank].wait(REPLY_SECONDS)
        return self._lost_child() or Fault(rank, GONE, "is gone: it crashed, or was killed")

    def _lost_child(self) -> Fault | None:
        codes = ((rank, child.poll()) for rank, child in self.children.items())
        return next((Fault(rank, GONE, describe_exit(code)) for rank, code in codes if code), None)

    # ---- End the process.

    def line_about(self, fault: Fault) -> str:
        """Return the message about a fault, once and on the first remaining rank of each machine; otherwise "".

        The message is also empty if the rank at fault has printed its error on this machine.
        """
        here = {rank for rank, (_, machine) in self.members.items() if machine == self.machine}
        printed = fault.kind == STOPPED or (fault.kind == FAILED and fault.rank in here)
        remaining = here
        if fault.kind != ORPHANED:
            remaining = here - {fault.rank}
        is_speaker = self.info.rank == min(remaining, default=self.info.rank)
        if not self._line_taken.acquire(blocking=False) or printed or not is_speaker:
            return ""
        name, _ = self.members.get(fault.rank, [f"rank {fault.rank}", ""])
        return f"cifar-lit: {name} {fault.what}. The run was ended. {self.advice()}".rstrip()

    def _end(self, fault: Fault) -> None:
        """Give the main thread time to exit by itself, then kill the process."""
        if fault.kind == STUCK and fault.rank == self.info.rank:
            self.write_stacks()
        self.close()
        if self.main_thread_ends.wait(EXIT_SECONDS[fault.kind]):
            time.sleep(REQUEUE_SECONDS if fault.kind == STOPPED else CLEANUP_SECONDS)
        elif line := self.line_about(fault):
            note(*line.split("\n"))
        with suppress(Exception):
            self.release()
        self.end_children()
        for worker in multiprocessing.active_children():
            worker.kill()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(fault.code)

    def write_stacks(self) -> None:
        """Write the Python stacks of all threads to stderr, and to `stacks-rank-N.txt` in the run folder."""
        name, _ = self.members[self.info.rank]
        note(f"cifar-lit: {name} hangs. Its threads:")
        faulthandler.dump_traceback(2)
        if self.folder:
            with suppress(OSError), (self.folder / f"stacks-rank-{self.info.rank}.txt").open("wb") as file:
                faulthandler.dump_traceback(file)

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        if self._watchdog:
            self._watchdog.close()

    def close_in_fork(self) -> None:
        """Close the sockets in a forked child; otherwise the other ranks would not see this process die."""
        self.close()
        for key in self._selector.get_map().values():
            cast(socket.socket, key.fileobj).close()

    def end_children(self) -> None:
        """Wait `CHILD_EXIT_SECONDS` for the ranks that this process has started, then kill them."""
        deadline = time.monotonic() + CHILD_EXIT_SECONDS
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.children.values():
            child.kill()
            child.wait()


class Coordinator(RankWatch):
    """The watch of the first rank. All others connect to its `port` with its `token`, and receive the list of members.

    Raise UsageError if another process uses MASTER_PORT.
    """

    def __init__(self, info: RankInfo, limit: float, token: str) -> None:
        super().__init__(info, limit)
        self.token = token
        if info.address is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        else:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            try:
                self._listener = socket.create_server(
                    ("", info.port or 0), family=family, backlog=128, dualstack_ipv6=dual
                )
            except OSError:
                raise UsageError(
                    f"MASTER_PORT {info.port} is in use by another process on this machine: "
                    "choose another port, the same for all machines"
                ) from None
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.port: int = self._listener.getsockname()[1]
        self._announced = False
        self._moved: dict[int, tuple[list[int], float]] = {}  # position and time when a rank last moved or led

    def _look(self) -> Fault | None:
        return super()._look() or self._absent_rank() or self._hanging_rank()

    def _accept(self) -> None:
        with suppress(OSError):  # already disconnected
            connected, _ = self._listener.accept()
            self._selector.register(connected, selectors.EVENT_READ, partial(self._welcome, JsonSocket(connected)))

    def _welcome(self, connection: JsonSocket) -> None:
        """Register a connection whose first message has the token and a missing rank; close other connections."""
        messages = connection.receive()
        if not messages and not connection.closed:
            return
        self._selector.unregister(connection.socket)
        try:
            hello = messages[0]
            valid = secrets.compare_digest(str(hello["token"]), self.token)
            rank, member = int(hello["rank"]), [str(hello["name"]), str(hello["machine"])]
        except (IndexError, KeyError, TypeError, ValueError):
            valid = False
        if not valid or not 0 < rank < self.info.world or rank in self.members:
            connection.socket.close()
            return
        self._listen_to(rank, connection)
        self.members[rank] = member
        self._send_all({"members": self.members, "store_port": self.store_port})

    def _absent_rank(self) -> Fault | None:
        # A Trainer starts the other ranks of its machine after preparing the data, which may take hours.
        missing = [rank for rank in range(0, self.info.world, self.info.per_node) if rank not in self.members]
        if missing and not self._announced and self.now > ANNOUNCE_SECONDS:
            self._announced = True
            note(f"waiting for rank {', '.join(map(str, missing))} of {self.info.world}")
        missing_children = [rank for rank in self.children if rank not in self.members]
        for ranks, since in ((missing, 0.0), (missing_children, self.children_started)):
            if ranks and self.now - since > JOIN_FACTOR * self.limit:
                return Fault(min(ranks), SILENT, f"did not connect within {JOIN_FACTOR * self.limit:.0f} s")
        return None

    def _hanging_rank(self) -> Fault | None:
        """Return a fault for a rank that sends heartbeats, but does not reach the position of the others."""
        positions = {**self._positions, self.info.rank: self.position}
        furthest = max(positions.values())
        for rank, position in positions.items():
            before, since = self._moved.get(rank, (None, 0.0))
            if position == furthest or position != before:
                self._moved[rank] = position, self.now
            elif self.now - since > HANG_FACTOR * self.limit:
                waited = f"has kept the others waiting for {HANG_FACTOR * self.limit:.0f} s"
                return Fault(rank, STUCK, f"{waited}: it hangs in a file system, a driver or a deadlock")
        return None


class Worker(RankWatch):
    """The watch of any other rank, connected to the coordinator."""

    def __init__(self, info: RankInfo, limit: float, connected: socket.socket, token: str) -> None:
        super().__init__(info, limit)
        self._listen_to(0, JsonSocket(connected))
        name, machine = self.members[info.rank]
        self._send_all({"token": token, "rank": info.rank, "name": name, "machine": machine})

    def is_welcome(self) -> bool:
        """Wait for the answer to the connection, and return whether it comes from this run's first rank."""
        while 0 not in self.members:
            if fault := self._look():
                if 0 not in self.members:
                    return False
                self._settle(fault)
        return True


def describe_exit(code: int) -> str:
    """Return the predicate of a message about a process that ended with this return code of `subprocess`."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    if name == "SIGKILL":
        return "was killed by SIGKILL, perhaps because memory ran out"
    return f"was killed by {name}"
