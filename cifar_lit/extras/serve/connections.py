"""Connections with limits on time and number, so that no client can block others.

uvicorn limits the header and how long an idle connection is kept, and refuses new clients above a number of
connections. It waits for slow requests and slow readers indefinitely.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 100  # each with a body in memory, and an open file
BODY_SECONDS = 10.0  # for which a client may pause
MIN_RATE = 8000  # bytes/s; a slower transfer counts as a pause
CLOSING_SECONDS = 1.0  # to receive the last answer
TICK_SECONDS = 0.25  # between two looks at the deadline
INVALID = "this is not a valid HTTP request, or its header is too long: send HTTP/1.1, as curl or a browser does"


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with limits, and with errors in JSON.

    Each client has a time budget of `BODY_SECONDS`. It decreases while the client has to send a request or to receive
    an answer, and increases by one second per `MIN_RATE` transferred bytes. A client without time left is disconnected.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.deadline = math.inf  # loop time of the disconnection; infinity while the service works on the request
        self._is_idle = True  # nothing was received since the last answer
        self._transferred = 0  # bytes since the last look at the deadline
        self._unsent = 0  # bytes of the answer that the system has not accepted yet

    def connection_made(self, transport: Any) -> None:
        """Accept a connection. Drop the slowest of the others if there are too many."""
        super().connection_made(transport)
        self.deadline = self.loop.time() + BODY_SECONDS
        self._timer = self.loop.call_later(TICK_SECONDS, self._tick)
        others = self.connections - {self}
        if len(others) >= MAX_CONNECTIONS:
            slowest = min(others, key=lambda connection: getattr(connection, "deadline", math.inf))
            slowest.transport.abort()
            self.connections.discard(slowest)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the client's clock."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Stop the client's clock after a whole request."""
        self._is_idle = False
        self._transferred += len(data)
        super().data_received(data)
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE) and not self.transport.is_closing():
            self.deadline = math.inf

    def on_response_complete(self) -> None:
        """Give the client time to receive the answer, and to send the rest of this body or the next request."""
        self._is_idle = True
        self.deadline = self.loop.time() + BODY_SECONDS
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP. uvicorn's own answer is plain text."""
        self._refuse(400, INVALID)

    def _refuse(self, status: int, text: str) -> None:
        """Close the connection, after a last answer unless the service is answering already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": text}).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self.deadline = self.loop.time() + CLOSING_SECONDS

    def _tick(self) -> None:
        """Move the deadline by the transferred bytes, and disconnect the client after it."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        transferred = self._transferred + max(0, self._unsent - unsent)
        self._transferred, self._unsent = 0, unsent
        if transferred and self.deadline < math.inf:
            self.deadline = min(self.deadline + transferred / MIN_RATE, now + BODY_SECONDS)
        if now > self.deadline and (self._is_idle or self.transport.is_closing()):
            self.transport.abort()
        elif now > self.deadline:
            self._refuse(408, f"the request paused for more than {BODY_SECONDS:g} s: send it faster")
        self._timer = self.loop.call_later(TICK_SECONDS, self._tick)
