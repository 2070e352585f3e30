"""The watch of every rank but the first: it sees that one, and hears from it about the others."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any

from cifar_lit.distributed.json_socket import Closed, JsonSocket, Member
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.watch import DONE, GONE, Fault, Watch

REPLY = 1.0  # seconds to wait for the first rank's word on who tells of a failure


class Worker(Watch):
    """A rank's connection to the first.

    connected: to the hub's port. token: the hub's.
    """

    def __init__(self, place: RankInfo, limit: float, connected: socket.socket, token: str) -> None:
        super().__init__(place, limit)
        self._line = JsonSocket(connected)
        self._line.send({"token": token, **self.me._asdict()})
        self._seen = time.monotonic()
        self._may_speak: bool | None = None
        self._replied = threading.Event()

    def tell(self, fault: Fault) -> None:
        """Lets the first rank know of a fault that it may not see: of a rank that this one has started."""
        if fault.rank in self.children:
            self._line.send({"end": fault.kind, "what": fault.what, "code": fault.code, "rank": fault.rank})

    def report(self, how: str, what: str, code: int) -> bool:
        """Tells the first rank of this one's own end; returns whether this one is to print why."""
        self._line.send({"end": how, "what": what, "code": code})
        if how == DONE:
            self.rest()
            return True
        deadline = time.monotonic() + REPLY
        while not self._replied.wait(0.01) and not self.found.is_set() and time.monotonic() < deadline:
            pass
        said = self.fault is not None and self.fault.rank != self.place.rank and self.fault.what == what
        return self._may_speak is not False and not said

    def forget(self) -> None:
        """Closes the connection of a fork."""
        super().forget()
        self._line.close()

    def look(self) -> Fault | None:
        """Takes what the first rank has sent, gives a sign of life, and sees whether it is still there."""
        try:
            if select.select([self._line], [], [], self.beat / 2)[0]:
                for message in self._line.receive():
                    if fault := self._heard(message):
                        return fault
                self._seen = time.monotonic()
        except (Closed, OSError, ValueError):  # ValueError: a connection that was closed here
            if self.closed:
                return None
            return Fault(0, GONE, "is gone: it crashed, or was killed")
        self._seen += self.slept()
        if self.beats():
            self._line.send({"at": self.position})
        if lost := self.lost_child() or self.lost_parent():
            return lost
        if self.now - self._seen > self.limit:
            return self.silent(0)
        return None

    def _heard(self, message: dict[str, Any]) -> Fault | None:
        if "members" in message:
            self.members = {each[0]: Member(*each) for each in message["members"]}
        if "speak" in message:
            self._may_speak = bool(message["speak"])
            self._replied.set()
        if message.get("end") == DONE:
            self.rest()
        return Fault(**message["fault"]) if "fault" in message else None
