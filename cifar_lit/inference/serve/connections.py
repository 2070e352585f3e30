"""Connections that end: what a client may take of time, of headers and of pieces, and who has to go when too many are there."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cifar_lit.inference.serve.bodies import Limits

MAX_CONNECTIONS = 2048  # 7 KB each
ACCEPTED_AT_ONCE = 64  # so few that others which were there before are not all closed for them before they are read
QUEUE = 512  # that the system lets wait
MAX_HEADER_BYTES = 16 * 1024  # of the request line, the headers and the trailers, as Node.js takes them
TOO_LONG = f"the request's header is too long: at most {MAX_HEADER_BYTES // 1024} KB"
MAX_DRAINED_BYTES = (
    256_000_000  # of a body whose answer was given before its end: closed at once, the answer might be lost
)
PIECE_BYTES = 1000  # that each piece of a body counts for beside its own: small ones cost more time than bytes
MIN_RATE = 8000  # bytes/s that keep a connection open
LINGER_SECONDS = 1.0


def connection_limit() -> int:
    """How many connections are kept: half as many as there may be open files, which may be more than a shell says at first."""
    files = 2 * MAX_CONNECTIONS
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        files = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return files // 2


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on time, headers, pieces and connections, and errors in JSON; uvicorn would wait for ever.

    A client that has to send, or to take its answer, uses up the `body_seconds` that it is given at first, and earns them back
    by the bytes that move: one that stops, or is slower than `MIN_RATE` for long, is let go, however little was left to do.

    deadline: when it will be; infinity while the service is at work for it. Where room is needed, the earliest goes first.
    part: of a request that is awaited: nothing of it yet, "header", "body"; "whole" while it waits for its answer, "answered"
        when that was given before the body's end, "refused" when nothing more is read.
    """

    def __init__(self, limits: Limits, max_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.part = ""
        self.deadline = math.inf
        self._limits, self._max_connections = limits, max_connections
        self._bytes = self._header_bytes = 0  # of the request so far
        self._unsent = 0  # bytes of the answer that the system did not take yet

    def connection_made(self, transport: Any) -> None:
        """Takes the connection; where there are too many, some of the slowest go."""
        super().connection_made(transport)
        self._give_time()
        if len(self.connections) > self._max_connections:
            for connection in slowest(self.connections, 1 + self._max_connections // 32):
                connection.drop()

    def data_received(self, data: bytes) -> None:
        """Reads on; what has no end is refused before it fills the memory."""
        if self.part in ("", "header", "body"):
            self._earn_time(len(data))
        if self.part != "refused":
            super().data_received(data)
        self._bytes += len(data)
        if self.part == "header" and self._bytes > MAX_HEADER_BYTES:
            self.refuse(431, TOO_LONG)
        elif self.part == "body" and self._bytes > 2 * self._limits.body + MAX_HEADER_BYTES:
            self.refuse(413, "the body takes too much to be sent: send larger pieces, and no more than the image")
        elif self._bytes > max(MAX_DRAINED_BYTES, 2 * self._limits.body):
            self.transport.abort()

    def on_message_begin(self) -> None:
        """A request's first byte; one that comes before the answer to the last is dropped, and the connection closed then."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("pipelined")
        self.part, self._bytes, self._header_bytes = "header", 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind the body."""
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size + 4
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(TOO_LONG)

    def on_headers_complete(self) -> None:
        """The body follows."""
        self.part = "body"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._bytes += PIECE_BYTES
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here: answering it has a time of its own."""
        self.part = "" if self.part == "answered" else "whole"
        self._give_time(math.inf if self.part else self._limits.body_seconds)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer was given: it is to be taken, and the next request or the rest of this one's body to come."""
        self.part = {"whole": "", "body": "answered"}.get(self.part, self.part)
        self._give_time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or comes before its turn; uvicorn's own answer is plain text."""
        if self.part == "whole":
            self.part, self.cycle.keep_alive = "refused", False
        elif self._header_bytes > MAX_HEADER_BYTES:
            self.refuse(431, TOO_LONG)
        else:
            self.refuse(400, "this is not a valid HTTP request: send HTTP/1.1, as curl or a browser does")

    def refuse(self, status: int, text: str) -> None:
        """The last answer on this connection. What still comes is dropped for a while: closed at once, it might be lost."""
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
        if self.cycle is not None:  # as if the client were gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def drop(self) -> None:
        """Closes the connection without a word, to make room."""
        self.transport.abort()
        self.connections.discard(self)

    def close_if_due(self) -> None:
        """Lets the client go if its time is over; to be called several times a second."""
        unsent = self.transport.get_write_buffer_size()
        self._earn_time(self._unsent - unsent)
        self._unsent = unsent
        if self.loop.time() < self.deadline:
            return
        if self.part in ("header", "body"):
            limit = f"{self._limits.body_seconds:g} s"
            self.refuse(
                408, f"the request did not go on within {limit}: send it faster, or serve with more --body-seconds"
            )
        else:
            self.transport.abort()

    def _give_time(self, seconds: float | None = None) -> None:
        self.deadline = self.loop.time() + (self._limits.body_seconds if seconds is None else seconds)

    def _earn_time(self, size: int) -> None:
        if size > 0 and self.deadline < math.inf:
            self.deadline = min(self.deadline + size / MIN_RATE, self.loop.time() + self._limits.body_seconds)


def slowest(connections: Iterable[Any], count: int) -> list[Any]:
    """Those of the connections that wait for their clients whose time is over first."""
    waiting = (connection for connection in connections if connection.deadline < math.inf)
    return heapq.nsmallest(count, waiting, key=lambda connection: connection.deadline)
