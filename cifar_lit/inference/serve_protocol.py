"""HTTP connections that end: uvicorn's protocol with limits on time, headers and connections, and errors in JSON."""

from __future__ import annotations

import asyncio
import json
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 512
LINGER_SECONDS = 1.0


def raw_answer(status: int, text: str) -> bytes:
    """A whole HTTP response with a JSON error, after which the connection is closed."""
    body = json.dumps({"error": text}, ensure_ascii=False).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


class PatientProtocol(HttpToolsProtocol):
    """A connection whose requests must arrive within a time.

    seconds: from a request's first byte (or the connection's start) to its last, also when it was answered before, as a body
    that is too large is. uvicorn itself would wait for ever.
    """

    seconds = 10.0

    def __init__(self, config: Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = True
        self._begun = self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "too many connections: close some, or come back later")
        else:
            self._arm(self.seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of the timer."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on; a header without end is refused before it fills the memory."""
        if self._refused:
            return
        super().data_received(data)
        if self._in_headers and not self._refused and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the request's header is too long: at most {MAX_HEADER_BYTES // 1024} KB")

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._begun = self._in_headers = True
        self._header_bytes = 0
        self._arm(self.seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here: answering it has a time of its own."""
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn's own answer is plain text."""
        self._refuse(400, "this is not a valid HTTP request: send HTTP/1.1, as curl or a browser does")

    def _refuse(self, status: int, text: str) -> None:
        """The last answer on this connection. What is still on its way is read and dropped for a while before the connection
        is closed: closed at once, the client might lose the answer with it.
        """
        self._refused = True
        self.transport.write(raw_answer(status, text))
        self.transport.write_eof()
        self._arm(LINGER_SECONDS)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """The request did not arrive in time: says so, unless it has its answer already."""
        answered = self.cycle is not None and self.cycle.response_started and not self._in_headers
        if self.transport.is_closing():
            return
        if self._begun and not answered and not self._refused:
            self._refuse(
                408,
                f"the request did not arrive within {self.seconds:g} s: send less, or start the service with more --body-seconds",
            )
        else:
            self.transport.close()
