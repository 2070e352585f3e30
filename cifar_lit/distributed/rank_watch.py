"""A thread in every rank that notices when another is gone, names it, and ends this one when its own work cannot go on.

Measured with two ranks over gloo: when one is killed, the other gets "Connection reset by peer" and no rank; when one is frozen
or hangs, DDPStrategy(timeout=…) raises without a name, and leaves the frozen process. That time also counts while a rank waits
for the first one's download or checkpoint, so that its 30 minutes cannot be made 60 s. torchrun knows none that is frozen.

Here all ranks hold a connection to the first. The system closes it at once when a process dies; one that is frozen, or cut off
from the network, is known by its silence; one whose main thread hangs, by the step that it does not reach. torch's store tells
nobody that a client has gone.
"""

from __future__ import annotations

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
# Seconds that the main thread is given to end by itself, by the error that a lost rank gives it; frozen ones give none.
EXIT_SECONDS = {GONE: 3.0, ORPHANED: 3.0, FAILED: 3.0, SILENT: 0.0, STUCK: 0.0, STOPPED: 15.0}
CLEANUP_SECONDS = 10.0  # after which a process that ends by itself is ended
REQUEUE_SECONDS = 90.0  # the same for one that was stopped, which may hand its job back to a scheduler
CHILD_EXIT_SECONDS = 3.0  # that ranks which this one has started are given to end
REPLY_SECONDS = (
    1.0  # for the first rank's word on whose fault it is, and for the exit code of a rank whose connection closed
)
HEARTBEAT_SECONDS = 1.0
JOIN_FACTOR = 5.0  # times the limit: how long ranks wait for each other at the start
HANG_FACTOR = 1.5  # times the limit: how long one rank's main thread may keep the others waiting
ANNOUNCE_SECONDS = 15.0  # after which the first one says whom it waits for
MAX_MESSAGE_BYTES = 1 << 20  # none of ours comes near

# A small process beside each rank kills it when it is frozen: one that was stopped (SIGSTOP), or waits for ever inside a driver
# or a file system, runs none of its own threads, and from another machine nobody could. It counts heartbeats rather than time:
# when a terminal or a scheduler stops the whole run, it stands still with it.
WATCHDOG = """
import os, select, signal, sys
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
    os.kill(rank, signal.SIGKILL)
"""


class Fault(NamedTuple):
    """Why a run cannot go on. rank: whose fault it is. kind: one of EXIT_SECONDS'. what: the rest of the sentence about it."""

    rank: int
    kind: str
    what: str
    code: int = 1


class JsonSocket:
    """JSON objects, one a line, over a connected socket, without ever waiting for the other side."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.closed = False  # nothing will come any more, as the other side is gone, or no rank
        self._received, self._unsent = b"", b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Hands a message to the system; what a frozen receiver leaves no room for is sent later, or never."""
        with self._sending, suppress(OSError):  # a closed connection shows when it is read
            self._unsent += json.dumps(message).encode() + b"\n"
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; sets `closed` where they are the last."""
        try:
            while (chunk := self.socket.recv(65536)) and len(self._received) <= MAX_MESSAGE_BYTES:
                self._received += chunk
            self.closed = True
        except OSError as error:
            self.closed = not isinstance(error, BlockingIOError)
        *lines, self._received = self._received.split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):  # of a stranger
            self.closed = True
            return []


class RankWatch(threading.Thread):
    """What the watches of all ranks have in common. limit: seconds of silence after which a rank counts as lost."""

    def __init__(self, info: RankInfo, limit: float) -> None:
        super().__init__(name="rank watch", daemon=True)
        self.info, self.limit = info, limit
        self.heartbeat_seconds = min(HEARTBEAT_SECONDS, limit / 5)
        self.machine = host = socket.gethostname()  # the same text for processes that see each other's process numbers
        with suppress(OSError):  # Linux: containers may share a host's name, but not its process numbers
            boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/proc/self/ns/pid").readlink()
            self.machine += f" {boot.strip()} {namespace}"
        self.members = {info.rank: [f"rank {info.rank} (process {os.getpid()} on {host})", self.machine]}
        self.position: list[int] = []  # how far the main thread is; see `RankProgress`
        self.fault: Fault | None = None
        self.fault_known = threading.Event()
        self.main_thread_ends = threading.Event()  # by itself
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # ranks that this process has started, and when
        self.children_started = 0.0
        self.advice: Callable[[], str] = lambda: ""  # how to go on
        self.release: Callable[[], None] = lambda: None  # gives back what an end in mid-work must not keep
        self.store_port = 0  # of torch's store, which the first rank serves and the process group uses
        self.connections: dict[int, JsonSocket] = {}
        self._selector = selectors.DefaultSelector()  # its keys' `data` are called when there is something to read
        self._last_heard: dict[int, float] = {}
        self._positions: dict[int, list[int]] = {}
        self._closed = False
        self._fault_lock, self._line_taken = threading.Lock(), threading.Lock()
        # Seconds of watching: they stand still while this process is stopped or starved, which is not the others' silence.
        self.now, self._last_heartbeat, self._looked = 0.0, -limit, time.monotonic()
        self._watchdog: IO[bytes] | None = None

    def adopt(self, children: Iterable[subprocess.Popen[bytes]]) -> None:
        """Takes charge of the ranks that this process has just started, which follow its own."""
        self.children_started = self.now
        self.children = dict(enumerate(children, self.info.rank + 1))

    def run(self) -> None:
        """Until a fault, or the end of the process; a watch that fails itself does not end the run."""
        self._start_watchdog()
        try:
            while not self._closed:
                fault = self.fault or self._look()
                if fault and not self._closed:
                    self._end(self._settle(fault))
        finally:
            self.close()

    def _start_watchdog(self) -> None:
        if os.name != "posix":
            return
        missed = round((self.limit + 2.0) / self.heartbeat_seconds)  # later than the others, who say that it was frozen
        argv = [sys.executable, "-I", "-S", "-c", WATCHDOG, *map(str, (os.getpid(), self.heartbeat_seconds, missed))]
        with suppress(OSError):  # it is a further safety, which a run does not fail for
            null = subprocess.DEVNULL
            self._watchdog = subprocess.Popen(argv, bufsize=0, stdin=subprocess.PIPE, stdout=null, stderr=null).stdin
            assert self._watchdog is not None  # the pipe that each heartbeat is a byte in; with it the watchdog ends
            os.set_blocking(self._watchdog.fileno(), False)

    def finish(self) -> None:
        """Tells the others that this rank has ended in order."""
        self.close()
        self._send_all({"done": True})

    def fail(self, fault: Fault) -> Fault:
        """Tells the others of this rank's own fault; returns that which the run ends for: the first that rank 0 has heard of."""
        if self.info.rank == 0:
            self.close()  # the main thread goes on to its own end, which in a notebook is not the process's
            self._settle(fault)
        else:
            self._send_all({"fault": fault})
            self.fault_known.wait(REPLY_SECONDS)
        self.end_children()
        return self.fault or fault

    def _settle(self, fault: Fault) -> Fault:
        """The fault that this rank ends for, unless it knows of another: this one. It tells those that may not see it."""
        with self._fault_lock:
            if self.fault is None and (self.info.rank == 0 or fault.rank in self.children):
                self._send_all({"fault": fault})
            self.fault = self.fault or fault
        self.fault_known.set()
        return self.fault

    def _send_all(self, message: dict[str, Any]) -> None:
        for connection in list(self.connections.values()):
            connection.send(message)

    # ---- what a watch sees

    def _look(self) -> Fault | None:
        """Waits half a heartbeat for news."""
        for key, _ in self._selector.select(self.heartbeat_seconds / 2):
            if fault := key.data():
                return fault
        elapsed = time.monotonic() - self._looked
        self._looked += elapsed
        self.now += min(elapsed, 3 * self.heartbeat_seconds)
        if self.now - self._last_heartbeat >= self.heartbeat_seconds:
            self._last_heartbeat = self.now
            with suppress(OSError, ValueError):  # ValueError: the main thread has closed it
                if self._watchdog:
                    self._watchdog.write(b".")
            self._send_all({"position": self.position})
        if self.info.parent is not None and os.getppid() != self.info.parent:
            return Fault(self.info.rank, ORPHANED, "has lost the torchrun that started it")
        what = f"has given no sign for {self.limit:.0f} s: it is frozen, or its machine cannot be reached"
        silent = (rank for rank, heard in self._last_heard.items() if self.now - heard > self.limit)
        return self._lost_child() or next((Fault(rank, SILENT, what) for rank in silent), None)

    def _listen_to(self, rank: int, connection: JsonSocket) -> None:
        self.connections[rank], self._last_heard[rank] = connection, self.now
        self._selector.register(connection.socket, selectors.EVENT_READ, partial(self._read, rank))

    def _read(self, rank: int) -> Fault | None:
        """Takes what a rank has sent: how far it is, how it ends and, from the first one, who takes part."""
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
        with suppress(KeyError, subprocess.TimeoutExpired):  # KeyError: this process has not started it
            self.children[rank].wait(REPLY_SECONDS)
        return self._lost_child() or Fault(rank, GONE, "is gone: it crashed, or was killed")

    def _lost_child(self) -> Fault | None:
        codes = ((rank, child.poll()) for rank, child in self.children.items())
        return next((Fault(rank, GONE, describe_exit(code)) for rank, code in codes if code), None)

    # ---- the end

    def line_about(self, fault: Fault) -> str:
        """What to print about a fault, once and by one rank of each machine, but where the rank at fault has done so itself."""
        here = {rank for rank, (_, machine) in self.members.items() if machine == self.machine}
        said = fault.kind == STOPPED or (fault.kind == FAILED and fault.rank in here)
        left = here - {fault.rank} if fault.kind != ORPHANED else here
        if not self._line_taken.acquire(blocking=False) or said or self.info.rank != min(left, default=self.info.rank):
            return ""
        name, _ = self.members.get(fault.rank, [f"rank {fault.rank}", ""])
        return f"cifar-lit: {name} {fault.what}. The run was ended. {self.advice()}".rstrip()

    def _end(self, fault: Fault) -> None:
        """Ends this process for a fault: gives its main thread the time to do so, then does it from outside."""
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

    def close(self) -> None:
        """Ends the watch: nothing is to be noticed any more."""
        self._closed = True
        if self._watchdog:
            self._watchdog.close()

    def close_in_fork(self) -> None:
        """Closes in a fork of this process what it holds, or the others would not see when this process dies."""
        self.close()
        for key in self._selector.get_map().values():
            cast(socket.socket, key.fileobj).close()

    def end_children(self) -> None:
        """Waits a little for the ranks that this process has started to end, then kills them."""
        deadline = time.monotonic() + CHILD_EXIT_SECONDS
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.children.values():
            child.kill()  # nothing happens to one that has ended
            child.wait()


class Coordinator(RankWatch):
    """The first rank's watch: all others are connected to it at `port` with `token`, and hear from it about each other.

    Raises:
        UsageError: when another process listens on the port that all are to meet at.
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
                reason = "which MASTER_PORT names, is taken on this machine by another process"
                raise UsageError(f"port {info.port}, {reason}: choose another, the same for all") from None
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.port: int = self._listener.getsockname()[1]
        self._announced = False
        self._moved: dict[int, tuple[list[int], float]] = {}  # where a rank was when it last moved, or was the furthest

    def _look(self) -> Fault | None:
        return super()._look() or self._absent_rank() or self._hanging_rank()

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again
            connected, _ = self._listener.accept()
            self._selector.register(connected, selectors.EVENT_READ, partial(self._welcome, JsonSocket(connected)))

    def _welcome(self, connection: JsonSocket) -> None:
        """A newcomer says which rank it is; strangers are sent away."""
        messages = connection.receive()
        if not messages and not connection.closed:
            return
        self._selector.unregister(connection.socket)
        try:
            hello = messages[0]
            known = secrets.compare_digest(str(hello["token"]), self.token)
            rank, member = int(hello["rank"]), [str(hello["name"]), str(hello["machine"])]
        except (IndexError, KeyError, TypeError, ValueError):
            known = False
        if not known or not 0 < rank < self.info.world or rank in self.members:
            connection.socket.close()
            return
        self._listen_to(rank, connection)
        self.members[rank] = member
        self._send_all({"members": self.members, "store_port": self.store_port})

    def _absent_rank(self) -> Fault | None:
        # ranks that a Trainer starts come when that one has prepared its data, which may take hours
        others = [rank for rank in range(0, self.info.world, self.info.per_node) if rank not in self.members]
        if others and not self._announced and self.now > ANNOUNCE_SECONDS:
            self._announced = True
            note(f"waiting for rank {', '.join(map(str, others))} of {self.info.world}")
        children = [rank for rank in self.children if rank not in self.members]
        for absent, since in ((others, 0.0), (children, self.children_started)):
            if absent and self.now - since > JOIN_FACTOR * self.limit:
                return Fault(min(absent), SILENT, f"has not come within {JOIN_FACTOR * self.limit:.0f} s")
        return None

    def _hanging_rank(self) -> Fault | None:
        """A rank whose main thread does not come to where the others wait for it, though its watch is alive."""
        positions = {**self._positions, self.info.rank: self.position}
        furthest = max(positions.values())
        for rank, position in positions.items():
            before, since = self._moved.get(rank, (None, 0.0))
            if position == furthest or position != before:
                self._moved[rank] = position, self.now
            elif self.now - since > HANG_FACTOR * self.limit:
                waited = f"has kept the others waiting for {HANG_FACTOR * self.limit:.0f} s"
                return Fault(rank, STUCK, f"{waited}: it hangs, in a file system, a driver or a deadlock")
        return None


class Worker(RankWatch):
    """The watch of every other rank, connected to the coordinator's port."""

    def __init__(self, info: RankInfo, limit: float, connected: socket.socket, token: str) -> None:
        super().__init__(info, limit)
        self._listen_to(0, JsonSocket(connected))
        name, machine = self.members[info.rank]
        self._send_all({"token": token, "rank": info.rank, "name": name, "machine": machine})

    def is_welcome(self) -> bool:
        """Waits for the answer of what the connection leads to: whether it is this run's first rank."""
        while 0 not in self.members:
            if fault := self._look():
                if 0 not in self.members:
                    return False
                self._settle(fault)
        return True


def describe_exit(code: int) -> str:
    """What an exit code, or minus a signal's number, says of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}" + (", as systems do that run out of memory" if name == "SIGKILL" else "")
