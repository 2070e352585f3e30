"""A connection between two ranks: JSON objects, one a line, without ever waiting for the other side."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 1 << 20  # bytes of a message; none of ours comes near


class Member(NamedTuple):
    """A rank as the others know it. machine: the same text for processes that see each other's process numbers."""

    rank: int
    pid: int
    host: str
    machine: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def this_process(rank: int) -> Member:
    """What the others are to know of this process."""
    host = socket.gethostname()
    machine = host
    with suppress(OSError):  # Linux: containers may share a host's name, but not its process numbers
        machine += f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return Member(rank, os.getpid(), host, machine)


class Closed(Exception):
    """The other side has closed the connection, or is no rank of ours."""


class JsonSocket:
    """One end of a connection over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self._unsent = b"", b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Hands a message to the system; what a frozen receiver leaves no room for is sent later, or never."""
        with self._sending, suppress(OSError):  # a closed connection shows when it is read
            self._unsent += json.dumps(message).encode() + b"\n"
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come; raises Closed after the last one."""
        closed = False
        try:
            while chunk := self.socket.recv(65536):
                self._received += chunk
                if len(self._received) > LONGEST:
                    break
            closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        *whole, self._received = self._received.split(b"\n")
        for text in whole:
            try:
                message = json.loads(text)
            except ValueError:
                raise Closed from None
            if not isinstance(message, dict):
                raise Closed
            yield message
        if closed:
            raise Closed

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()
