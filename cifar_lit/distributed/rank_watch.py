"""A thread in every rank that notices when another is gone, names it, and ends this one when its own work cannot go on.

What torch and Lightning do, measured with two ranks over gloo: when one is killed, the other gets "Connection reset by peer"
with a port, no rank; when one is frozen or hangs, DDPStrategy(timeout=…) raises after that time without a name, and leaves the
frozen process. That time also counts while a rank waits in order, for the first one's download or checkpoint, so that its 30
minutes (NCCL: 10) cannot be made 60 s. torchrun's agent ends all ranks for one that has crashed, but knows none that is frozen.

Here all ranks hold a connection to the first. The system closes it at once when a process dies, however it does; one that is
frozen, or cut off from the network, is known by its silence; one whose main thread hangs, by the step that it does not reach.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

from cifar_lit.distributed.json_socket import JsonSocket, Member, this_process
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.watchdog import start_watchdog

GONE, ORPHANED, FAILED, SILENT, STUCK, STOPPED = "gone", "orphaned", "failed", "silent", "stuck", "stopped"
# Seconds that the main thread is given to end by itself, by the error that a lost rank gives it; frozen ones give none.
EXIT_SECONDS = {GONE: 3.0, ORPHANED: 3.0, FAILED: 3.0, SILENT: 0.0, STUCK: 0.0, STOPPED: 15.0}
CLEANUP_SECONDS = 10.0  # after which a process that ends by itself is ended
REQUEUE_SECONDS = 90.0  # the same for one that was stopped, which may hand its job back to a scheduler
CHILD_EXIT_SECONDS = 3.0  # that ranks which this one has started are given to end
EXIT_CODE_SECONDS = 1.0  # in which the system knows how a process ended whose connection it has closed
REPLY_SECONDS = 1.0  # to wait for the first rank's word on whose fault it is
HEARTBEAT_SECONDS = 1.0
JOIN_FACTOR = 5.0  # times the limit: how long ranks wait for each other at the start
HANG_FACTOR = 1.5  # times the limit: how long one rank's main thread may keep the others waiting
ANNOUNCE_SECONDS = 15.0  # after which the first one says whom it waits for


class Fault(NamedTuple):
    """Why a run cannot go on. rank: whose fault it is. kind: one of EXIT_SECONDS'. what: the rest of the sentence about it."""

    rank: int
    kind: str
    what: str
    code: int = 1


class RankWatch(threading.Thread):
    """What the watch of the first rank and that of the others have in common.

    Args:
        info: this process's rank.
        limit: seconds of silence after which a rank counts as lost.
    """

    def __init__(self, info: RankInfo, limit: float) -> None:
        super().__init__(name="rank watch", daemon=True)
        self.info, self.limit = info, limit
        self.heartbeat_seconds = min(HEARTBEAT_SECONDS, limit / 5)
        self.member = this_process(info.rank)
        self.members: dict[int, Member] = {info.rank: self.member}
        self.position: list[int] = []  # how far the main thread is; see `RankProgress`
        self.fault: Fault | None = None
        self.fault_known = threading.Event()
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # ranks that this process has started, and when
        self.children_started = 0.0
        self.advice: Callable[[], str] = lambda: ""  # how to go on
        self.release: Callable[[], None] = lambda: None  # gives back what an end in mid-work must not keep
        self.connections: dict[int, JsonSocket] = {}
        self._selector = selectors.DefaultSelector()
        self._last_heard: dict[int, float] = {}
        self._ended: set[int] = set()  # ranks that ended in order, or have said why they did not
        self._closed = False
        self.main_thread_ends = threading.Event()  # by itself
        self._fault_lock, self._line_taken = threading.Lock(), threading.Lock()
        # Seconds of watching: they stand still while this process is stopped or starved, which is not the others' silence.
        self.now, self._last_heartbeat, self._looked = 0.0, -limit, time.monotonic()
        # later than the others, who say that it was frozen
        self._watchdog = start_watchdog(limit + 2.0, self.heartbeat_seconds)

    def adopt(self, children: Iterable[subprocess.Popen[bytes]]) -> None:
        """Takes charge of the ranks that this process has just started, which follow its own."""
        self.children_started = self.now
        self.children = dict(enumerate(children, self.info.rank + 1))

    def run(self) -> None:
        """Until a fault, or the end of the process; a watch that fails itself does not end the run."""
        try:
            while not self._closed:
                if fault := self._look():
                    settled = self._settle(fault)
                    if settled is fault:
                        self.broadcast(fault)
                    self._end(settled)
        finally:
            self.close()

    def finish(self) -> None:
        """Tells the others that this rank has ended in order."""
        self.close()
        self._send_all({"done": True})

    def fail(self, fault: Fault) -> Fault:
        """Tells the others of this rank's own fault; returns that which the run ends for: the first that rank 0 has heard of."""
        raise NotImplementedError

    def broadcast(self, fault: Fault) -> None:
        """Lets other ranks know of a fault."""
        self._send_all({"fault": fault})

    def _send_all(self, message: dict[str, Any]) -> None:
        for connection in list(self.connections.values()):
            connection.send(message)

    def _settle(self, fault: Fault) -> Fault:
        """The fault that this rank ends for: this one, unless it is known of another."""
        with self._fault_lock:
            self.fault = self.fault or fault
        self.fault_known.set()
        return self.fault

    # ---- what a watch sees

    def _look(self) -> Fault | None:
        """Waits half a heartbeat for news, and returns the fault that it sees."""
        for key, _ in self._selector.select(self.heartbeat_seconds / 2):
            if fault := self._read(key):
                return fault
        elapsed = time.monotonic() - self._looked
        self._looked += elapsed
        self.now += min(elapsed, 3 * self.heartbeat_seconds)
        if self.now - self._last_heartbeat >= self.heartbeat_seconds:
            self._last_heartbeat = self.now
            if self._watchdog:
                self._watchdog.heartbeat()
            self._send_all({"position": self.position})
        return self._lost_child() or self._lost_parent() or self._silent_rank()

    def _read(self, key: selectors.SelectorKey) -> Fault | None:
        """Takes what a rank has sent: its number is the key's `data`."""
        connection, rank = self.connections[key.data], key.data
        self._last_heard[rank] = self.now
        for message in connection.receive():
            if fault := self._handle(rank, message):
                return fault
        if not connection.closed or self._closed:
            return None
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self.connections[rank], self._last_heard[rank]
        if rank in self._ended:
            return None
        return self._exit_code(rank) or Fault(rank, GONE, "is gone: it crashed, or was killed")

    def _handle(self, rank: int, message: dict[str, Any]) -> Fault | None:
        """Takes a message of a rank."""
        raise NotImplementedError

    def _silent_rank(self) -> Fault | None:
        """A rank that gives no sign. A frozen one is killed by its watchdog."""
        for rank, heard in self._last_heard.items():
            if rank not in self._ended and self.now - heard > self.limit:
                what = f"has given no sign for {self.limit:.0f} s: it is frozen, or its machine cannot be reached"
                return Fault(rank, SILENT, what)
        return None

    def _lost_child(self) -> Fault | None:
        """A rank that this process has started and that ended in failure."""
        for rank, child in self.children.items():
            if code := child.poll():
                return Fault(rank, GONE, describe_exit(code))
        return None

    def _exit_code(self, rank: int) -> Fault | None:
        """How a rank ended that this process has started: the system may take a moment to say it."""
        if rank not in self.children:
            return None
        with suppress(subprocess.TimeoutExpired):
            self.children[rank].wait(EXIT_CODE_SECONDS)
        return self._lost_child()

    def _lost_parent(self) -> Fault | None:
        """The agent of torchrun that started this process is gone, which nobody else would end it for."""
        if self.info.parent is not None and os.getppid() != self.info.parent:
            return Fault(self.info.rank, ORPHANED, "has lost the torchrun that started it")
        return None

    # ---- the end

    def line_about(self, fault: Fault) -> str:
        """The line to print about a fault, once; empty when another rank prints it, or it was asked for before."""
        if not self._line_taken.acquire(blocking=False) or not self._prints(fault):
            return ""
        who = self.members.get(fault.rank, f"rank {fault.rank}")
        return f"cifar-lit: {who} {fault.what}. The run was ended. {self.advice()}".rstrip()

    def _prints(self, fault: Fault) -> bool:
        """Whether this rank prints the line: one of each machine does, but where the rank at fault has done so itself."""
        here = {rank for rank, member in self.members.items() if member.machine == self.member.machine}
        if fault.kind == STOPPED or (fault.kind == FAILED and fault.rank in here):
            return False
        gone = set() if fault.kind == ORPHANED else {fault.rank}
        return self.info.rank == min(here - gone or {self.info.rank})

    def _end(self, fault: Fault) -> None:
        """Ends this process for a fault: gives its main thread the time to do so, then does it itself."""
        self.close()
        if not self.main_thread_ends.wait(EXIT_SECONDS[fault.kind]):
            if line := self.line_about(fault):
                print(line, file=sys.stderr, flush=True)
            self._abandon(fault.code)
        time.sleep(REQUEUE_SECONDS if fault.kind == STOPPED else CLEANUP_SECONDS)
        self._abandon(fault.code)

    def close(self) -> None:
        """Ends the watch: nothing is to be noticed any more."""
        self._closed = True
        if self._watchdog:
            self._watchdog.close()
            self._watchdog = None

    def close_in_fork(self) -> None:
        """Closes in a fork of this process what it holds, or the others would not see when this process dies."""
        if self._watchdog:
            self._watchdog.close()
        for connection in self.connections.values():
            connection.socket.close()

    def _abandon(self, code: int) -> None:
        """Ends the process from outside of its main thread, which waits for a rank that is gone."""
        with suppress(Exception):
            self.release()
        self.end_children()
        for worker in multiprocessing.active_children():
            worker.kill()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def end_children(self) -> None:
        """Waits a little for the ranks that this process has started, then kills them."""
        deadline = time.monotonic() + CHILD_EXIT_SECONDS
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.children.values():
            child.kill()  # nothing happens to one that has ended
            child.wait()


class Coordinator(RankWatch):
    """The first rank's watch: all others are connected to it at `port` with `token`, and hear from it about each other."""

    def __init__(self, info: RankInfo, limit: float) -> None:
        super().__init__(info, limit)
        self._listener = _listen(everywhere=info.address is not None)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._positions: dict[int, list[int]] = {}
        self._last_level: dict[int, float] = {}  # when a rank last moved, or was where the furthest is
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._announced = False
        self._ended.add(info.rank)

    def fail(self, fault: Fault) -> Fault:
        """Ends the others for this rank's fault, unless all end for another."""
        if (settled := self._settle(fault)) is fault:
            self.broadcast(fault)
        self.end_children()
        self.close()
        return settled

    def close_in_fork(self) -> None:
        """Closes the port too."""
        super().close_in_fork()
        self._listener.close()

    def _look(self) -> Fault | None:
        """Sees who has not come, and who hangs, too."""
        fault = super()._look()
        self._moved(self.info.rank, self.position)
        return fault or self._absent_rank() or self._hanging_rank()

    def _read(self, key: selectors.SelectorKey) -> Fault | None:
        """Takes what a rank has sent, or a newcomer, whose key's `data` is its connection until it has said who it is."""
        if key.fileobj is self._listener:
            with suppress(OSError):  # it has gone again
                connected, _ = self._listener.accept()
                self._selector.register(connected, selectors.EVENT_READ, JsonSocket(connected))
        elif isinstance(key.data, JsonSocket):
            return self._welcome(key.data)
        else:
            return super()._read(key)
        return None

    def _welcome(self, connection: JsonSocket) -> Fault | None:
        """A rank says which it is; strangers are sent away."""
        messages = connection.receive()
        if not messages and not connection.closed:
            return None
        self._selector.unregister(connection.socket)
        try:
            hello = messages[0]
            known = secrets.compare_digest(str(hello["token"]), self.token)
            member = Member(int(hello["rank"]), int(hello["pid"]), str(hello["host"]), str(hello["machine"]))
        except (IndexError, KeyError, TypeError, ValueError):
            known = False
        if not known or not 0 < member.rank < self.info.world or member.rank in self.connections:
            connection.socket.close()
            return None
        self._selector.register(connection.socket, selectors.EVENT_READ, member.rank)
        self.members[member.rank], self.connections[member.rank] = member, connection
        self._last_heard[member.rank] = self.now
        self._send_all({"members": list(self.members.values())})
        faults = [self._handle(member.rank, message) for message in messages[1:]]
        return next(filter(None, faults), None)

    def _handle(self, rank: int, message: dict[str, Any]) -> Fault | None:
        if "position" in message:
            self._moved(rank, message["position"])
        if "done" not in message and "fault" not in message:
            return None
        self._ended.add(rank)
        self._positions.pop(rank, None)
        return Fault(*message["fault"]) if "fault" in message else None

    def _absent_rank(self) -> Fault | None:
        """A rank that has not come; whom it waits for is said on the way."""
        # ranks that a Trainer starts come when that one has prepared its data, which may take hours
        others = [rank for rank in range(0, self.info.world, self.info.per_node) if rank not in self.members]
        if others and not self._announced and self.now > ANNOUNCE_SECONDS:
            self._announced = True
            names = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
            print(f"waiting for rank {names} of {self.info.world}", file=sys.stderr, flush=True)
        children = [rank for rank in self.children if rank not in self.members]
        for absent, since in ((others, 0.0), (children, self.children_started)):
            if absent and self.now - since > JOIN_FACTOR * self.limit:
                return Fault(min(absent), SILENT, f"has not come within {JOIN_FACTOR * self.limit:.0f} s")
        return None

    def _moved(self, rank: int, position: list[int]) -> None:
        if position != self._positions.get(rank):
            self._positions[rank], self._last_level[rank] = position, self.now

    def _hanging_rank(self) -> Fault | None:
        """A rank whose main thread does not come to where the others wait for it, though its watch is alive."""
        furthest = max(self._positions.values())
        for rank, position in self._positions.items():
            if position == furthest:
                self._last_level[rank] = self.now
            elif self.now - self._last_level[rank] > HANG_FACTOR * self.limit:
                waited = f"has kept the others waiting for {HANG_FACTOR * self.limit:.0f} s"
                return Fault(rank, STUCK, f"{waited}: it hangs, in a file system, a driver or a deadlock")
        return None


class Worker(RankWatch):
    """The watch of every other rank, connected to the coordinator's port."""

    def __init__(self, info: RankInfo, limit: float, connected: socket.socket, token: str) -> None:
        super().__init__(info, limit)
        self._coordinator = JsonSocket(connected)
        self._coordinator.send({"token": token, **self.member._asdict()})
        self.connections[0], self._last_heard[0] = self._coordinator, self.now
        self._selector.register(connected, selectors.EVENT_READ, 0)

    def broadcast(self, fault: Fault) -> None:
        """Lets the first rank know of what it may not see: the loss of a rank that this one has started."""
        if fault.rank in self.children:
            super().broadcast(fault)

    def fail(self, fault: Fault) -> Fault:
        """Tells the first rank of this one's fault, and hears from it whether all end for another."""
        self._coordinator.send({"fault": fault})
        self.fault_known.wait(REPLY_SECONDS)
        return self.fault or fault

    def _handle(self, rank: int, message: dict[str, Any]) -> Fault | None:
        if "members" in message:
            self.members = {member[0]: Member(*member) for member in message["members"]}
        if "done" in message:
            self.close()
        return Fault(*message["fault"]) if "fault" in message else None


def describe_exit(code: int) -> str:
    """What an exit code, or minus a signal's number, says of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", as systems do that run out of memory" if name == "SIGKILL" else "")


def _listen(everywhere: bool) -> socket.socket:
    """A socket at a free port of this machine, which others reach over IPv4 and IPv6 if they are to."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=128)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # it may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)
