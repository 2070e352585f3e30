"""The service over HTTP: the page, its health, predictions, errors as `{"error": "one line"}`, and connections that end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio import TimerHandle
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import uvicorn
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cifar_lit.hardware import keep_freed_memory
from cifar_lit.inference.load import Classifier
from cifar_lit.inference.serve.bodies import Limits, RequestError, parse_body
from cifar_lit.inference.serve.workers import Decoders, NetRequest, NetRunner
from cifar_lit.text import note

PAGE = Path(__file__).parent / "page"
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STOP_SECONDS = 5  # in which requests that run are answered when the service is stopped
DEFAULT_TOP = 3
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 512
LINGER_SECONDS = 1.0


def serve(
    classifier: Classifier, sock: socket.socket, local: bool, limits: Limits, version: str, on_ready: Callable[[], None]
) -> None:
    """Serves a net until Ctrl-C or SIGTERM; requests that run then are answered first.

    Args:
        sock: a listening socket; `local` if it is bound to this machine alone.
        version: of the program, for /health.
        on_ready: called when requests are answered.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for connections and decoding: waiting threads spin
    keep_freed_memory()
    with closing(Decoders(classifier.size, classifier.channels, limits)) as decoders:
        app = App(NetRunner(classifier), decoders, limits, local, version)
        config = uvicorn.Config(
            GZipMiddleware(app), http=cast("type[asyncio.Protocol]", partial(TimeoutProtocol, limits.body_seconds)), ws="none",
            lifespan="off", log_config=None, log_level="critical", access_log=False, server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # uvicorn hears them first, and raises them again when it has ended
        asyncio.run(_run(uvicorn.Server(config), sock, on_ready))


async def _run(server: uvicorn.Server, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    on_ready()
    await serving


class App:
    """The ASGI application: who may ask, how many at a time, for how long; no exception leaves it.

    A service that is bound to this machine alone (`local`) answers only to names of this machine: a page from elsewhere that
    makes its own name point here (DNS rebinding) is refused. Pages of other sites are refused in any case, and no answer allows
    them to read it.
    """

    def __init__(self, net: NetRunner, decoders: Decoders, limits: Limits, local: bool, version: str) -> None:
        self.net, self.decoders, self.limits, self.local = net, decoders, limits, local
        classifier = net.classifier
        self._health = {
            "status": "ok", "net": classifier.card.net, "classes": classifier.classes, "image_size": classifier.size,
            "channels": classifier.channels, "device": str(classifier.net.mean.device), "version": version,
            "limits": asdict(limits),
        }  # fmt: skip
        self._pages = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        self._running += 1
        try:
            self._check(request)
            answer = await self._answer(request)
        except RequestError as error:
            answer = JSONResponse({"error": error.text}, error.status, {"Retry-After": "1"} if error.status == 503 else None)
        except ClientDisconnect:
            return
        except Exception as error:
            note(f"cifar-lit: {scope['path']} failed: {type(error).__name__}: {error}")
            answer = JSONResponse({"error": "the service failed on this request; its console says why"}, 500)
        finally:
            self._running -= 1
        await answer(scope, receive, send)

    def _check(self, request: Request) -> None:
        """Raises RequestError where the client may not ask, or not now."""
        host = request.headers.get("host", "")
        if self.local and not _is_local(host):
            text = f"this service answers to localhost, not to {host[:80]!r}: start it with --host to be reached by name"
            raise RequestError(400, text)
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != host:
                text = "pages of other sites may not use this service: ask it from its own page, or from a program"
                raise RequestError(403, text)
            if self._running > self.limits.requests:
                raise RequestError(503, f"more than {self.limits.requests} requests at a time: send it again later")

    async def _answer(self, request: Request) -> Response:
        path, method = request.url.path, request.method
        if path not in (*self._pages, "/health", "/predict"):
            raise RequestError(404, f"there is nothing at {path[:80]}: POST /predict, GET /health, or the page at /")
        allowed = "POST" if path == "/predict" else "GET"
        if method != allowed and (allowed, method) != ("GET", "HEAD"):
            raise RequestError(405, f"{path} does not take {method[:20]}: use {allowed}")
        if path in self._pages:
            content, kind = self._pages[path]
            return Response(content, 200, HEADERS, kind)
        return JSONResponse(self._health if path == "/health" else await self._predict(request))

    async def _predict(self, request: Request) -> dict[str, Any]:
        """The JSON of a prediction, of a list of them where the request holds a form or a list."""
        top, seen = self._top(request.query_params.get("top")), request.query_params.get("seen") in ("1", "true")
        self._check_size(int(request.headers.get("content-length", "0")))
        body = bytearray()
        async for chunk in request.stream():
            self._check_size(len(body) + len(chunk))
            body += chunk
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                kind = request.headers.get("content-type", "")
                images = await asyncio.to_thread(parse_body, kind, bytes(body), self.limits)
                pixels: list[bytes] = []
                turn = self.decoders.count  # files are decoded in turns, so that a batch leaves room for others
                for start in range(0, len(images.files), turn):
                    files = images.files[start : start + turn]
                    pixels += await asyncio.gather(*(self.decoders.decode(name, data) for name, data in files))
                predictions = await self.net.predict(NetRequest(pixels, top, seen))
        except TimeoutError:
            limit = f"{self.limits.answer_seconds:g} s"
            raise RequestError(503, f"there was no answer within {limit}: the service is busy, try again later") from None
        return {"predictions": predictions} if images.many else predictions[0]

    def _top(self, text: str | None) -> int:
        """How many classes to name."""
        count = len(self.net.classifier.classes)
        if text is None:
            return min(DEFAULT_TOP, count)
        if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
            raise RequestError(422, f"top must be a whole number from 1 to {count}, not {text[:20]!r}")
        return min(int(text), count)

    def _check_size(self, size: int) -> None:
        if size > self.limits.body:
            limit = f"{self.limits.body / 1e6:g} MB"
            raise RequestError(413, f"the body is larger than {limit}: send less, or start the service with a larger --max-mb")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "::1") or name.endswith(".localhost") or (name.startswith("127.") and name.count(".") == 3)


class TimeoutProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on time, headers and connections, and errors in JSON.

    A request must arrive within `seconds` from its first byte (or the connection's start) to its last, also when it was
    answered before, as a body that is too large is. uvicorn itself would wait for ever.
    """

    def __init__(self, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._seconds = seconds
        self._timer: TimerHandle | None = None
        self._part = ""  # of a request that is being read: header, body, or refused
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "too many connections: close some, or come back later")
        else:
            self._set_timer(self._seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of the timer."""
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on; a header without end is refused before it fills the memory."""
        if self._part == "refused":
            return
        super().data_received(data)
        if self._part == "header" and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the request's header is too long: at most {MAX_HEADER_BYTES // 1024} KB")

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._part, self._header_bytes = "header", 0
        self._set_timer(self._seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._part = "body"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here: answering it has a time of its own."""
        self._set_timer(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn's own answer is plain text."""
        self._refuse(400, "this is not a valid HTTP request: send HTTP/1.1, as curl or a browser does")

    def _refuse(self, status: int, text: str) -> None:
        """The last answer on this connection. What still comes is dropped for a while: closed at once, it might be lost."""
        self._part = "refused"
        body = json.dumps({"error": text}, ensure_ascii=False).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._set_timer(LINGER_SECONDS)

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        """The request did not arrive in time: says so, unless it has its answer already."""
        if self._part == "header" or (self._part == "body" and not self.cycle.response_started):
            limit = f"{self._seconds:g} s"
            self._refuse(408, f"the request did not arrive within {limit}: send less, or serve with more --body-seconds")
        else:
            self.transport.close()
