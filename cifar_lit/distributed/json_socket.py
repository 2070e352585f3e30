"""A connection between two ranks: JSON objects, one a line, without ever waiting for the other side.

torch.distributed has no such thing: a call of its store waits for the answer, so that a frozen first rank, which serves the
store, would stop whoever asks; and the store does not tell anybody that a client's connection was closed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

MAX_MESSAGE_BYTES = 1 << 20  # none of ours comes near


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


class JsonSocket:
    """One end of a connection over a connected socket. closed: nothing will come any more; the other side is gone, or no rank."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.closed = False
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
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._received = self._received.split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            messages.append(message)
        return messages
