"""Connections with limits on time, header size and number, so that no client can block others."""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections.abc import Iterable
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cifar_lit.extras.serve.bodies import Limits

MAX_CONNECTIONS = 2048  # 7 KB each
MAX_HEADER_BYTES = 16 * 1024  # request line, headers and trailers together; the limit of Node.js
TOO_LONG = f"the request's header is too long: send at most {MAX_HEADER_BYTES // 1024} KB"
MAX_DRAINED_BYTES = 256_000_000  # read and dropped after an early answer; closing at once could lose the answer
PIECE_BYTES = 1000  # counted for each piece of a body besides its size: parsing a piece takes time
MIN_RATE = 8000  # bytes/s that keep a connection open
LINGER_SECONDS = 1.0


def connection_limit() -> int:
    """Return the number of connections to keep, and raise the soft limit of open files to twice as many if possible."""
    if sys.platform == "win32" or find_spec("resource") is None:  # Windows has no such limit
        return MAX_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MAX_CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return files // 2


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits, and with errors in JSON.

    uvicorn waits for slow clients indefinitely. Here each client has a time budget, initially `body_seconds`. The
    budget decreases while the client has to send a request or to receive an answer. Transferred bytes increase the
    budget by one second per `MIN_RATE` bytes, up to `body_seconds`. A client without time left is disconnected.

    Attributes:
        deadline: loop time at which the client is disconnected; infinity while the service works on the request.
        part: progress of the request: "" (nothing received), "header", "body", "whole" (complete, not yet answered),
            "answered" (the body has not ended yet), or "refused" (further bytes are dropped).
    """

    def __init__(self, limits: Limits, max_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.part = ""
        self.deadline = math.inf
        self._limits, self._max_connections = limits, max_connections
        self._bytes = self._header_bytes = 0  # received for the current request
        self._unsent = 0  # bytes of the answer that the system has not accepted yet

    def connection_made(self, transport: Any) -> None:
        """Accept a connection. Drop some of the slowest if there are too many."""
        super().connection_made(transport)
        self._give_time()
        if len(self.connections) > self._max_connections:
            for connection in slowest(self.connections, 1 + self._max_connections // 32):
                connection.transport.abort()
                self.connections.discard(connection)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Refuse the request before it can fill the memory."""
        if self.part in ("", "header", "body"):
            self._earn_time(len(data))
        if self.part != "refused":
            super().data_received(data)
        self._bytes += len(data)
        if self.part == "header" and self._bytes > MAX_HEADER_BYTES:
            self.refuse(431, TOO_LONG)
        elif self.part == "body" and self._bytes > 2 * self._limits.body + MAX_HEADER_BYTES:
            self.refuse(413, "the body is sent in too many pieces: send larger pieces, and nothing besides the image")
        elif self._bytes > max(MAX_DRAINED_BYTES, 2 * self._limits.body):
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Start a request. Reject one that arrives before the previous request is answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("pipelined")
        self.part, self._bytes, self._header_bytes = "header", 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the address."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer after the body."""
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size + 4
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(TOO_LONG)

    def on_headers_complete(self) -> None:
        """Expect the body."""
        self.part = "body"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a piece of the body."""
        self._bytes += PIECE_BYTES
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the client's clock while the service works on the request."""
        self.part = "" if self.part == "answered" else "whole"
        self._give_time(math.inf if self.part else self._limits.body_seconds)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Reset the client's time to receive the answer, and to send the rest of this body or the next request."""
        self.part = {"whole": "", "body": "answered"}.get(self.part, self.part)
        self._give_time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP. uvicorn's own answer is plain text."""
        if self.part == "whole":  # a pipelined request: answer the previous one, then close
            self.part, self.cycle.keep_alive = "refused", False
        elif self._header_bytes > MAX_HEADER_BYTES:
            self.refuse(431, TOO_LONG)
        else:
            self.refuse(400, "this is not a valid HTTP request: send HTTP/1.1, as curl or a browser does")

    def refuse(self, status: int, text: str) -> None:
        """Send the last answer on this connection, and drop further bytes. Closing at once could lose the answer."""
        if self.part != "answered":
            body = json.dumps({"error": text}, ensure_ascii=False).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.write_eof()
        self.part = "refused"
        self._give_time(LINGER_SECONDS)
        if self.cycle is not None:  # tell the application that the client has disconnected
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def close_if_due(self) -> None:
        """Disconnect the client if its deadline has passed. Call this several times a second."""
        unsent = self.transport.get_write_buffer_size()
        self._earn_time(self._unsent - unsent)
        self._unsent = unsent
        if self.loop.time() < self.deadline:
            return
        if self.part in ("header", "body"):
            limit = f"{self._limits.body_seconds:g} s"
            text = f"the request paused for more than {limit}: send it faster, or serve with a larger --body-seconds"
            self.refuse(408, text)
        else:
            self.transport.abort()

    def _give_time(self, seconds: float | None = None) -> None:
        self.deadline = self.loop.time() + (self._limits.body_seconds if seconds is None else seconds)

    def _earn_time(self, size: int) -> None:
        if size > 0 and self.deadline < math.inf:
            self.deadline = min(self.deadline + size / MIN_RATE, self.loop.time() + self._limits.body_seconds)


def slowest(connections: Iterable[Any], count: int) -> list[Any]:
    """Return the `count` connections with the earliest deadlines, without those that wait for the service."""
    waiting = (connection for connection in connections if connection.deadline < math.inf)
    return heapq.nsmallest(count, waiting, key=lambda connection: connection.deadline)
