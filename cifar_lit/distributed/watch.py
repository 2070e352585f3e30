"""A thread in every rank that notices when another is gone, and ends this one when its own work cannot go on.

All ranks hold a connection to the first. The system closes it at once when a process dies, however it does; one that is
frozen, or cut off from the network, is known by its silence. A rank that waits for a lost one in a collective can do nothing
but end: NCCL would keep it for ten minutes, gloo for thirty.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from cifar_lit.distributed.json_socket import Member, this_process
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.watchdog import guard_of_this_process

GONE, ORPHANED, FAILED, SILENT, STUCK, STOPPED, DONE = "gone", "orphaned", "failed", "silent", "stuck", "stopped", "done"
# Seconds that the main thread is given to end by itself, by the error that a lost rank gives it; frozen ones give none.
PATIENCE = {GONE: 3.0, ORPHANED: 3.0, FAILED: 3.0, SILENT: 0.0, STUCK: 0.0, STOPPED: 15.0}
BEAT = 1.0  # seconds between two signs of life
LAST = 10.0  # seconds after which a process that ends by itself is ended
CHILDREN = 3.0  # seconds that ranks which this one has started are given to end


class Fault(NamedTuple):
    """Why a run cannot go on. rank: whose fault it is. kind: one of PATIENCE's. what: the rest of the sentence about it."""

    rank: int
    kind: str
    what: str
    code: int = 1


class Watch(threading.Thread):
    """What the watch of the first rank and that of the others have in common.

    limit: seconds of silence after which a rank counts as lost.
    """

    def __init__(self, place: RankInfo, limit: float) -> None:
        super().__init__(name="rank watch", daemon=True)
        self.place, self.limit = place, limit
        self.beat = min(BEAT, limit / 5)
        self.me = this_process(place.rank)
        self.members: dict[int, Member] = {place.rank: self.me}
        self.position: list[int] = []  # how far the main thread is; see `Progress`
        self.fault: Fault | None = None
        self.found = threading.Event()  # a fault is
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # ranks that this process has started, and when
        self.launched = 0.0
        self.advice: Callable[[], str] = lambda: ""  # how to go on
        self.release: Callable[[], None] = lambda: None  # gives back what an end in mid-work must not keep
        self.closed = False
        self._left = threading.Event()  # the main thread ends by itself
        self._speaking = threading.Lock()
        self.now, self._beaten = time.monotonic(), 0.0
        self._guard = guard_of_this_process(limit + 2.0, self.beat)  # later than the others, who say that it was frozen

    def adopt(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Takes charge of the ranks that this process has just started, which follow its own."""
        self.launched = time.monotonic()
        self.children = dict(enumerate(children, self.place.rank + 1))

    def run(self) -> None:
        """Until a fault, or the end of the process; a watch that fails itself does not end the run."""
        try:
            while not self.closed:
                fault = self.look()
                if fault is not None:
                    self.tell(fault)
                    self.end(fault)
        finally:
            self.rest()

    def look(self) -> Fault | None:
        """Waits half a beat for news, and returns the fault that is found."""
        raise NotImplementedError

    def tell(self, fault: Fault) -> None:
        """Lets other ranks know of a fault."""
        raise NotImplementedError

    # ---- what both do at every beat

    def slept(self) -> float:
        """Seconds for which this process itself was stopped or starved since the last look: its own, not others' silence.

        Sets `now`, which all that follows reckons with: the process may be stopped at any moment.
        """
        before, self.now = self.now, time.monotonic()
        passed = self.now - before
        return passed if passed > max(3 * self.beat, self.limit / 3) else 0.0

    def beats(self) -> bool:
        """Whether it is time for a sign of life to the others; the guard gets one too."""
        if self.now - self._beaten < self.beat:
            return False
        self._beaten = self.now
        if self._guard:
            self._guard.reassure()
        return True

    def lost_child(self) -> Fault | None:
        """A rank that this process has started and that ended in failure."""
        for rank, child in self.children.items():
            if code := child.poll():
                return Fault(rank, GONE, how_it_ended(code))
        return None

    def lost_parent(self) -> Fault | None:
        """The agent of torchrun that started this process is gone, which nobody else would end it for."""
        if self.place.parent is not None and os.getppid() != self.place.parent:
            return Fault(self.place.rank, ORPHANED, "has lost the torchrun that started it")
        return None

    def silent(self, rank: int) -> Fault:
        """The fault of a rank that gives no sign. A frozen one is killed by its guard."""
        return Fault(rank, SILENT, f"has given no sign for {self.limit:.0f} s: it is frozen, or its machine cannot be reached")

    # ---- the end

    def sentence(self, fault: Fault) -> str:
        """The line about a fault, and how to go on."""
        who = self.members.get(fault.rank, f"rank {fault.rank}")
        return f"cifar-lit: {who} {fault.what}. The run was ended. {self.advice()}".rstrip()

    def speaks(self, fault: Fault) -> bool:
        """Whether this rank tells of a fault: one of each machine does, but where the rank at fault has told of it itself."""
        here = {rank for rank, member in self.members.items() if member.machine == self.me.machine}
        if fault.kind == STOPPED or (fault.kind == FAILED and fault.rank in here):
            return False
        gone = set() if fault.kind == ORPHANED else {fault.rank}
        return self.place.rank == min(here - gone or {self.place.rank})

    def end(self, fault: Fault) -> None:
        """Ends this process for a fault: gives its main thread the time to do so, then does it itself."""
        if self.fault is None:
            self.fault = fault
            self.found.set()
        self.rest()
        if not self._left.wait(PATIENCE[fault.kind]):
            line = self.say(fault)
            if line:
                print(line, file=sys.stderr, flush=True)
            self._abandon(fault.code)
        time.sleep(LAST if fault.kind != STOPPED else 9 * LAST)  # which may hand its job back to a scheduler
        self._abandon(fault.code)

    def say(self, fault: Fault) -> str:
        """The line to print about a fault, once; empty when another rank prints it, or it was asked for before."""
        if not self._speaking.acquire(blocking=False):
            return ""
        return self.sentence(fault) if self.speaks(fault) else ""

    def leave(self) -> None:
        """The main thread ends by itself."""
        self._left.set()

    def rest(self) -> None:
        """Ends the watch: nothing is to be noticed any more."""
        self.closed = True
        if self._guard:
            self._guard.close()
            self._guard = None

    def forget(self) -> None:
        """Closes in a fork of this process what it holds, or the others would not see when this process dies."""
        if self._guard:
            self._guard.close()

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
        deadline = time.monotonic() + CHILDREN
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self.children.values():
            child.kill()  # nothing happens to one that has ended
            child.wait()


def how_it_ended(code: int) -> str:
    """What an exit code, or minus a signal's number, says of a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", as systems do that run out of memory" if name == "SIGKILL" else "")
