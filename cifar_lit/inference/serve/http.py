"""The service over HTTP: the page, its health, predictions, errors as `{"error": "one line"}`, and connections that end."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio import TimerHandle
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cifar_lit.inference.serve.images import DecoderPool, Limits, RequestError, parse_body
from cifar_lit.inference.serve.net import ModelInfo

PAGE = Path(__file__).parent / "page"
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MAX_BODIES = 16  # as many full-sized bodies are held at a time
DEFAULT_TOP = 3
MAX_INLINE_BYTES = 100_000  # of a body that is parsed in less time than a thread takes to start
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 512
LINGER_SECONDS = 1.0


def error(status: int, text: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer with one line that says what is wrong."""
    return JSONResponse({"error": text}, status, {**(headers or {}), **({"Retry-After": "1"} if status == 503 else {})})


def set_up_app(app: FastAPI, info: ModelInfo, decoders: DecoderPool, limits: Limits, local: bool, version: str) -> None:
    """Gives LitServe's app our page, health and errors; of its own routes only POST /predict stays.

    local: whether the service is bound to this machine alone. version: of the program, for /health.
    """
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) == "/predict"]
    app.router.redirect_slashes = False
    app.state.ready, app.state.reader = True, RequestReader(info, decoders, limits)
    contents = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
    facts = {"net": info.net, "classes": list(info.classes), "image_size": list(info.size), "channels": info.channels}
    about = {"status": "ok", **facts, "device": info.device, "version": version, "limits": asdict(limits)}

    async def page(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, 200, HEADERS, kind)

    async def health(request: Request) -> Response:
        return JSONResponse(about) if app.state.ready else error(503, "the net is being loaded again")

    for path in FILES:
        app.add_route(path, page, ["GET"])
    app.add_route("/health", health, ["GET"])

    async def answer_error(request: Request, fault: Exception) -> Response:
        if isinstance(fault, RequestError):
            return error(fault.status, fault.text)
        assert isinstance(fault, HTTPException)
        path, method = request.url.path[:80], request.method[:20]
        allowed = sorted({word.strip() for word in (fault.headers or {}).get("Allow", "").split(",")} - {"HEAD"})
        texts = {
            404: f"there is nothing at {path}: POST /predict, GET /health, or the page at /",
            405: f"{path} does not take {method}: use {' or '.join(allowed)}",
            500: "the net failed on this request; the service's console says why",
        }
        return error(fault.status_code, texts.get(fault.status_code, str(fault.detail)), fault.headers)

    app.add_exception_handler(RequestError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    app.add_middleware(RequestGuard, state=app.state, limits=limits, local=local)


class RequestReader:
    """From a request to what the net's process takes: {"pixels": (H·W·C bytes of each image), "top", "seen", "many"}."""

    def __init__(self, info: ModelInfo, decoders: DecoderPool, limits: Limits) -> None:
        self.info, self.decoders, self.limits = info, decoders, limits
        self._held = 0  # bytes of the bodies of all requests

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Raises RequestError for whatever is wrong with the request."""
        top, seen = self._top(request.query_params.get("top")), request.query_params.get("seen") in ("1", "true")
        body = bytearray()
        try:
            self._check_size(int(request.headers.get("content-length", "0")))
            async for chunk in request.stream():
                self._check_size(len(body) + len(chunk))
                body += chunk
                self._held += len(chunk)
                if self._held > MAX_BODIES * self.limits.body:
                    raise RequestError(503, "too much is being sent at once: send it again later")
            timeout: asyncio.Timeout = request.scope["timeout"]
            timeout.reschedule(asyncio.get_running_loop().time() + self.limits.answer_seconds)
            content = (request.headers.get("content-type", ""), bytes(body), self.limits)
            images = parse_body(*content) if len(body) < MAX_INLINE_BYTES else await asyncio.to_thread(parse_body, *content)
            pixels: list[bytes] = []
            turn = self.decoders.count  # files are decoded in turns, so that a batch leaves room for others
            for start in range(0, len(images.files), turn):
                files = images.files[start : start + turn]
                pixels += await asyncio.gather(*(self.decoders.decode(name, data) for name, data in files))
        finally:
            self._held -= len(body)
        return {"pixels": pixels, "top": top, "seen": seen, "many": images.many}

    def _check_size(self, size: int) -> None:
        if size > self.limits.body:
            limit = f"{self.limits.body / 1e6:g} MB"
            raise RequestError(413, f"the body is larger than {limit}: send less, or start the service with a larger --max-mb")

    def _top(self, text: str | None) -> int:
        count = len(self.info.classes)
        if text is None:
            return min(DEFAULT_TOP, count)
        if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
            raise RequestError(422, f"top must be a whole number from 1 to {count}, not {text[:20]!r}")
        return min(int(text), count)


class RequestGuard:
    """ASGI around everything: who may ask, how many at a time, for how long; no exception leaves it.

    A service that is bound to this machine alone answers only to names of this machine: a page from elsewhere that makes its
    own name point here (DNS rebinding) is refused. Pages of other sites are refused in any case, and no answer allows them to
    read it.
    """

    def __init__(self, app: ASGIApp, state: Any, limits: Limits, local: bool) -> None:
        self.app, self.state, self.limits, self.local = app, state, limits, local
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._running += 1
        try:
            self._check(scope)
            async with asyncio.timeout(None) as scope["timeout"]:
                await self.app(scope, receive, send_and_note)
            return
        except RequestError as refusal:
            answer = error(refusal.status, refusal.text)
        except ClientDisconnect:
            return
        except TimeoutError:
            limit = f"{self.limits.answer_seconds:g} s"
            answer = error(503, f"there was no answer within {limit}: the service is busy, try again later")
        except Exception as fault:
            print(f"cifar-lit: {scope['path']} failed: {type(fault).__name__}: {fault}", file=sys.stderr, flush=True)
            answer = error(500, "the service failed on this request; its console says why")
        finally:
            self._running -= 1
        if not begun:
            await answer(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.local and not _is_local(host):
            text = f"this service answers to localhost, not to {host[:80]!r}: start it with --host to be reached by name"
            raise RequestError(400, text)
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get(b"origin")
            if origin is not None and urlsplit(origin).netloc != host:
                text = "pages of other sites may not use this service: ask it from its own page, or from a program"
                raise RequestError(403, text)
            if not self.state.ready:
                raise RequestError(503, "the net is being loaded again: send the request again in some seconds")
            if self._running > self.limits.requests:
                raise RequestError(503, f"more than {self.limits.requests} requests at a time: send it again later")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "::1") or name.endswith(".localhost") or (name.startswith("127.") and name.count(".") == 3)


# ---- Connections that end.


class TimeoutProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on time, headers and connections, and errors in JSON.

    A request must arrive within `seconds` from its first byte (or the connection's start) to its last, also when it was
    answered before, as a body that is too large is. uvicorn itself would wait for ever.
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
            self._start_timer(self.seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of the timer."""
        self._stop_timer()
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
        self._start_timer(self.seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is here: answering it has a time of its own."""
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; uvicorn's own answer is plain text."""
        self._refuse(400, "this is not a valid HTTP request: send HTTP/1.1, as curl or a browser does")

    def _refuse(self, status: int, text: str) -> None:
        """The last answer on this connection. What is still on its way is read and dropped for a while before the connection
        is closed: closed at once, the client might lose the answer with it.
        """
        self._refused = True
        body = json.dumps({"error": text}, ensure_ascii=False).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._start_timer(LINGER_SECONDS)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """The request did not arrive in time: says so, unless it has its answer already."""
        answered = self.cycle is not None and self.cycle.response_started and not self._in_headers
        if self.transport.is_closing():
            return
        if self._begun and not answered and not self._refused:
            limit = f"{self.seconds:g} s"
            self._refuse(
                408, f"the request did not arrive within {limit}: send less, or start the service with more --body-seconds"
            )
        else:
            self.transport.close()
