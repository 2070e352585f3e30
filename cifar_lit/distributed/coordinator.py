"""The first rank's watch, which all others are connected to."""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from cifar_lit.distributed.json_socket import Closed, JsonSocket, Member
from cifar_lit.distributed.rank_info import RankInfo
from cifar_lit.distributed.watch import DONE, FAILED, GONE, PATIENCE, SILENT, STUCK, Fault, Watch

JOIN = 5.0  # times the limit: how long ranks wait for each other at the start
BEHIND = 1.5  # times the limit: how long one rank's main thread may keep the others waiting
ANNOUNCED = 15.0  # seconds after which the first one says whom it waits for


class Coordinator(Watch):
    """Notices when a rank is gone, and tells the others.

    port, token: what others connect with.
    """

    def __init__(self, place: RankInfo, limit: float) -> None:
        super().__init__(place, limit)
        self._listener = _listen(everywhere=place.address is not None)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        self._lines: dict[int, JsonSocket] = {}
        self._seen: dict[int, float] = {}
        self._positions: dict[int, list[int]] = {}
        self._level: dict[int, float] = {}  # when a rank last moved, or was where the furthest is
        self._over: set[int] = {place.rank}  # ranks that ended in order
        self._failures: dict[str, int] = {}  # which rank tells of what
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._since, self._announced = time.monotonic(), False

    def tell(self, fault: Fault) -> None:
        """Lets all of them know of a fault."""
        for line in list(self._lines.values()):
            line.send({"fault": fault._asdict()})

    def close(self) -> None:
        """Lets the others end without this one, in order."""
        self.rest()
        for line in list(self._lines.values()):
            line.send({"end": DONE})

    def teller(self, what: str, rank: int) -> int:
        """The rank that is to tell of a failure, which may be that of several: the first that asks. It is told once."""
        return self._failures.setdefault(what, rank)

    def forget(self) -> None:
        """Closes the connections of a fork."""
        super().forget()
        self._listener.close()
        for line in self._lines.values():
            line.close()

    def look(self) -> Fault | None:
        """Takes what ranks have sent, gives a sign of life, and sees who is missing."""
        for key, _ in self._selector.select(self.beat / 2):
            if key.fileobj is self._listener:
                self._accept()
            elif fault := self._read(key.data, key.fileobj):  # type: ignore[arg-type]
                return fault
        if slept := self.slept():
            self._seen = {rank: seen + slept for rank, seen in self._seen.items()}
            self._level = {rank: level + slept for rank, level in self._level.items()}
            self._since += slept
        if self.beats():
            for line in self._lines.values():
                line.send({})
        self._moved(self.place.rank, self.position)
        return self.lost_child() or self.lost_parent() or self._missing() or self._stuck()

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        self._selector.register(JsonSocket(connected), selectors.EVENT_READ, None)

    def _read(self, rank: int | None, line: JsonSocket) -> Fault | None:
        """Takes what a rank, or a connection that has not said yet which it is, has sent."""
        try:
            for message in line.receive():
                if rank is None:
                    rank = self._welcome(line, message)
                elif fault := self._heard(rank, message):
                    return fault
        except Closed:
            self._selector.unregister(line)
            line.close()
            if rank is None:
                return None  # somebody else's
            self._lines.pop(rank, None)
            if rank in self._over:
                return None
            if fault := self._exit_code(rank):
                return fault
            return Fault(rank, GONE, "is gone: it crashed, or was killed")
        if rank is not None:
            self._seen[rank] = time.monotonic()
        return None

    def _exit_code(self, rank: int) -> Fault | None:
        """How a rank ended that this process has started: the system may take a moment to say it."""
        if rank not in self.children:
            return None
        deadline = time.monotonic() + 1.0
        while self.children[rank].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.lost_child()

    def _welcome(self, line: JsonSocket, message: dict[str, Any]) -> int:
        """A rank says which it is; raises Closed for strangers."""
        try:
            known = secrets.compare_digest(str(message["token"]), self.token)
            member = Member(int(message["rank"]), int(message["pid"]), str(message["host"]), str(message["machine"]))
        except (KeyError, TypeError, ValueError):
            raise Closed from None
        if not known or not 0 < member.rank < self.place.world or member.rank in self._lines:
            raise Closed
        self.members[member.rank], self._lines[member.rank] = member, line
        self._selector.modify(line, selectors.EVENT_READ, member.rank)
        everybody = [list(each) for each in self.members.values()]
        for each in self._lines.values():
            each.send({"members": everybody})
        return member.rank

    def _heard(self, rank: int, message: dict[str, Any]) -> Fault | None:
        if "at" in message:
            self._moved(rank, message["at"])
        how = message.get("end")
        if how is None:
            return None
        self._over.add(rank)
        self._positions.pop(rank, None)
        if how == DONE:
            return None
        what = str(message["what"])
        if how == FAILED:
            self._lines[rank].send({"speak": self.teller(what, rank) == rank})
        return Fault(int(message.get("rank", rank)), how, what, int(message["code"])) if how in PATIENCE else None

    def _missing(self) -> Fault | None:
        """A rank that is silent, or that has not come; whom it waits for is said on the way."""
        now = self.now
        for rank, seen in self._seen.items():
            if rank not in self._over and now - seen > self.limit:
                return self.silent(rank)
        # ranks that a Trainer starts come when that one has prepared its data, which may take hours
        others = [rank for rank in range(0, self.place.world, self.place.each) if rank not in self.members]
        if others and not self._announced and now - self._since > ANNOUNCED:
            self._announced = True
            print(f"waiting for rank {_listed(others)} of {self.place.world}", file=sys.stderr, flush=True)
        for absent, since in ((others, self._since), ([*self.children.keys() - self.members.keys()], self.launched)):
            if absent and now - since > JOIN * self.limit:
                what = f"has not come within {JOIN * self.limit:.0f} s"
                return Fault(min(absent), SILENT, what)
        return None

    def _moved(self, rank: int, position: list[int]) -> None:
        if position != self._positions.get(rank):
            self._positions[rank], self._level[rank] = position, time.monotonic()

    def _stuck(self) -> Fault | None:
        """A rank whose main thread does not come to where the others wait for it, though its watch is alive."""
        now, furthest = self.now, max(self._positions.values())
        for rank, position in self._positions.items():
            if position == furthest:
                self._level[rank] = now
            elif now - self._level[rank] > BEHIND * self.limit:
                waited = f"has kept the others waiting for {BEHIND * self.limit:.0f} s"
                return Fault(rank, STUCK, f"{waited}: it hangs, in a file system, a driver or a deadlock")
        return None


def _listen(everywhere: bool) -> socket.socket:
    """A socket at a free port of this machine, which others reach over IPv4 and IPv6 if they are to."""
    if not everywhere:
        return socket.create_server(("127.0.0.1", 0), backlog=128)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # it may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
