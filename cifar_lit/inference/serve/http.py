"""The service over HTTP: the page, its health and predictions. Errors are JSON: `{"error": "one line"}`."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import torch
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cifar_lit.hardware import keep_freed_memory
from cifar_lit.inference.load import Classifier
from cifar_lit.inference.serve.bodies import Limits, RequestError, parse_body
from cifar_lit.inference.serve.connections import LimitedProtocol, connection_limit, slowest
from cifar_lit.inference.serve.workers import Decoders, NetRequest, NetRunner
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.text import note

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STOP_SECONDS = 5  # for running requests to be answered when the service stops
ACCEPTED_AT_ONCE = 64  # connections per turn of the loop; with more, some would be dropped before they are read
QUEUE = 512  # connections that wait in the system's queue
DEFAULT_TOP = 3
MAX_HELD_BYTES = 256_000_000  # all bodies in memory together; at least two of the largest size
SMALL_BODY_BYTES = 64_000  # smaller bodies are always accepted
TOO_MUCH = "the service holds too many large requests: try again later"


def serve(
    classifier: Classifier, sock: socket.socket, names: frozenset[str] | None, limits: Limits, version: str,
    on_ready: Callable[[], None],
) -> None:  # fmt: skip
    """Serve a net until Ctrl-C, SIGTERM or SIGHUP. Running requests are still answered.

    Args:
        classifier: the net.
        sock: a listening socket.
        names: names of this machine that clients may use; None if the socket is bound to a loopback address.
        limits: limits of a request.
        version: version of the program, for /health.
        on_ready: callback for the start of the service.
    """
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # Leave one core to connections and decoding: torch's threads spin while they wait.
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    keep_freed_memory()
    with closing(Decoders(classifier.preparation, limits)) as decoders:
        app = App(NetRunner(classifier), decoders, limits, names, version)
        config = uvicorn.Config(
            app, http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, limits, connection_limit())), ws="none",
            lifespan="off", log_config=None, log_level="critical", access_log=False, server_header=False,
            proxy_headers=False, backlog=ACCEPTED_AT_ONCE, timeout_graceful_shutdown=STOP_SECONDS,
        )  # fmt: skip
        server = _Server(config, on_ready)
        app.connections = server.server_state.connections
        asyncio.run(server.serve([sock]))


class _Server(uvicorn.Server):
    """uvicorn's server. It also stops at SIGHUP, and disconnects clients that have used up their time."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the stop signals. uvicorn would raise them again at the end."""
        for number in stop_signals():
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop. A second Ctrl-C does not wait for running requests."""
        if sig == HANGUP:
            accept_hangup()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer requests, and report it."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: _log(context["message"], context.get("exception"))
        )
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(QUEUE)
        self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Disconnect slow clients, 10 times a second."""
        for connection in list(self.server_state.connections):
            cast(LimitedProtocol, connection).close_if_due()
        return await super().on_tick(counter)


def _log(what: str, error: BaseException | None) -> None:
    note(f"cifar-lit: {what} failed: {type(error).__name__}: {str(error)[:300]}")


class App:
    """The ASGI application. It checks the origin of requests, limits their number, and answers every exception.

    The Host header must be localhost or a loopback address, which prevents DNS rebinding. If the service is not bound
    to a loopback address, every address and the `names` of this machine are valid too. Requests from pages of other
    sites are refused, and no response has CORS headers.
    """

    def __init__(
        self, net: NetRunner, decoders: Decoders, limits: Limits, names: frozenset[str] | None, version: str
    ) -> None:
        self.net, self.decoders, self.limits, self.names = net, decoders, limits, names
        classifier = net.classifier
        self._health = {
            "status": "ok", "net": classifier.card.net, "classes": classifier.classes,
            "image_size": classifier.preparation.size, "resize": classifier.preparation.resize,
            "channels": classifier.preparation.channels, "device": str(classifier.net.mean.device),
            "version": version, "limits": asdict(limits),
        }  # fmt: skip
        # In memory: an open file per slow reader would use up the file descriptors.
        self._pages = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._running = 0  # requests that have arrived completely and have no answer yet
        self._parsing = asyncio.Lock()
        self._held = 0  # bytes of all bodies in memory; `scope["held"]` counts those of one request
        self.connections: set[Any] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        try:
            self._check(request)
            answer = await self._answer(request)
        except RequestError as error:
            retry = {"Retry-After": "1"} if error.status == 503 else None
            answer = JSONResponse({"error": error.text}, error.status, retry)
        except ClientDisconnect:
            return
        except Exception as error:
            _log(scope["path"][:80], error)
            answer = JSONResponse({"error": "the service failed on this request; its console says why"}, 500)
        answer.headers.update(HEADERS)
        await answer(scope, receive, send)

    def _check(self, request: Request) -> None:
        """Raise RequestError for an unknown host name or a page of another site."""
        host = ",".join(request.headers.getlist("host")).lower()  # two headers make an invalid name
        if not _is_own_name(host, self.names):
            text = f"this service answers to localhost, not to {host[:80]!r}: start it with --host to use its name"
            if self.names is not None:
                remedy = "use its address, or start it with --host and that name"
                text = f"this service does not answer to {host[:80]!r}: {remedy}"
            raise RequestError(400, text)
        # Browsers send Origin, except with a GET from a page of the same site. Behind a TLS proxy it is https.
        origins = request.headers.getlist("origin")
        if request.method not in ("GET", "HEAD") and not {*origins} <= {f"http://{host}", f"https://{host}"}:
            text = "pages of other sites may not use this service: use its own page, or a program"
            raise RequestError(403, text)

    async def _answer(self, request: Request) -> Response:
        path, method = request.scope["path"], request.method
        if path not in (*FILES, "/health", "/predict"):
            text = f"there is nothing at {quote(path[:80])}: use POST /predict, GET /health, or the page at /"
            raise RequestError(404, text)
        allowed = ("POST",) if path == "/predict" else ("GET", "HEAD")
        if method not in allowed:
            raise RequestError(405, f"{path} does not take {method[:20]}: use {allowed[0]}")
        if path in FILES:
            content, kind = self._pages[path]
            return Response(content, media_type=kind)
        return JSONResponse(self._health if path == "/health" else await self._predict(request))

    async def _predict(self, request: Request) -> dict[str, Any]:
        """Return the JSON of a prediction, or of a list of predictions for a form or a JSON list."""
        top, seen = self._top(request.query_params.get("top")), request.query_params.get("seen") in ("1", "true")
        scope = request.scope
        try:
            chunks = await self._receive(request)
            if self._running >= self.limits.requests:
                raise RequestError(503, f"more than {self.limits.requests} concurrent requests: try again later")
            self._running += 1
            try:
                async with asyncio.timeout(self.limits.answer_seconds):
                    kind = request.headers.get("content-type", "")
                    async with self._parsing:  # one at a time, because parsing copies the body
                        body = b"".join(chunks)
                        chunks.clear()
                        images = await asyncio.to_thread(parse_body, kind, body, self.limits)
                        del body
                    pixels = await self.decoders.decode(images.files)
                    predictions = await self.net.predict(NetRequest(pixels, top, seen))
            finally:
                self._running -= 1
        except TimeoutError:
            text = f"there was no answer within {self.limits.answer_seconds:g} s: the service is busy, try again later"
            raise RequestError(503, text) from None
        finally:
            self._held -= scope.pop("held", 0)
        return {"predictions": predictions} if images.many else predictions[0]

    async def _receive(self, request: Request) -> list[bytes]:
        """Return the pieces of a body. Raise RequestError if it is too large."""
        chunks: list[bytes] = []
        size, scope = 0, request.scope
        self._check_size(int(request.headers.get("content-length", "0")))
        async for chunk in request.stream():
            size += len(chunk)
            self._check_size(size)
            scope["held"] = scope.get("held", 0) + len(chunk)
            self._held += len(chunk)
            if size > SMALL_BODY_BYTES and self._held > max(MAX_HELD_BYTES, 2 * self.limits.body):
                self._make_room(scope)
            chunks.append(chunk)
        return chunks

    def _make_room(self, scope: Scope) -> None:
        """Refuse the slowest of the incomplete large requests. Raise RequestError if this request is one of them."""
        large = [one for one in self.connections if one.part == "body" and one.scope.get("held", 0) > SMALL_BODY_BYTES]
        refused = slowest(large, 1 + len(large) // 32)
        for connection in refused:
            if connection.scope is not scope:
                self._held -= connection.scope.pop("held")
                connection.refuse(503, TOO_MUCH)
        if not refused or any(connection.scope is scope for connection in refused):
            raise RequestError(503, TOO_MUCH)

    def _top(self, text: str | None) -> int:
        """Return the number of classes to name."""
        count = len(self.net.classifier.classes)
        if text is None:
            return min(DEFAULT_TOP, count)
        if not re.fullmatch("[1-9][0-9]{0,5}", text):
            raise RequestError(422, f"top must be a whole number from 1 to {count}, not {text[:20]!r}")
        return min(int(text), count)

    def _check_size(self, size: int) -> None:
        if size > self.limits.body:
            limit = f"{self.limits.body / 1e6:g} MB"
            text = f"the body is larger than {limit}: send less, or start the service with a larger --max-mb"
            raise RequestError(413, text)


def _is_own_name(host: str, names: frozenset[str] | None) -> bool:
    """Return whether a Host header names this machine, with any port.

    Other names, also *.localhost, are refused: their owner could point them to this machine. Addresses cannot be
    redirected: all are accepted, but only loopback addresses if `names` is None.
    """
    match = re.fullmatch(r"(?:\[([0-9a-f:]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", host)
    name = (match[1] or match[2]) if match else ""
    if name == "localhost" or name in (names or ()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return names is not None or address.is_loopback
