"""The service over HTTP: the page, its health, predictions, errors as `{"error": "one line"}`, and connections that end."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
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
from cifar_lit.inference.serve.connections import ACCEPTED_AT_ONCE, QUEUE, LimitedProtocol, connection_limit, slowest
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
STOP_SECONDS = 5  # in which requests that run are answered when the service is stopped
WATCH_SECONDS = 0.1  # between two looks for clients whose time is over
DEFAULT_TOP = 3
MAX_HELD_BYTES = 256_000_000  # of all bodies together, and no less than two of the largest
TOO_MUCH = "the service holds too many large requests: send it again later"
SMALL_BODY_BYTES = 64_000  # which need not make room: all of them together are not much


def serve(
    classifier: Classifier, sock: socket.socket, names: frozenset[str] | None, limits: Limits, version: str,
    on_ready: Callable[[], None],
) -> None:  # fmt: skip
    """Serve a net until Ctrl-C, SIGTERM or SIGHUP. Requests that are running then are answered first.

    Args:
        sock: a listening socket.
        names: names of this machine that clients may use; None if the socket is bound to this machine alone.
        version: of the program, for /health.
        on_ready: called when requests are answered.
    """
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(
        max(1, torch.get_num_threads() - 1)
    )  # a core for connections and decoding: waiting threads spin
    keep_freed_memory()
    with closing(Decoders(classifier.size, classifier.channels, classifier.resize, limits)) as decoders:
        app = App(NetRunner(classifier), decoders, limits, names, version)
        config = uvicorn.Config(
            app, http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, limits, connection_limit())), ws="none",
            lifespan="off", log_config=None, log_level="critical", access_log=False, server_header=False, proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE, timeout_graceful_shutdown=STOP_SECONDS,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # uvicorn hears them first, and raises them again when it has ended
        server = uvicorn.Server(config)

        def stop_after_hangup(number: int, frame: object) -> None:  # uvicorn handles no SIGHUP
            accept_hangup()
            server.handle_exit(signal.SIGTERM, None)

        if HANGUP is not None and HANGUP in stop_signals():
            signal.signal(HANGUP, stop_after_hangup)
        app.connections = server.server_state.connections
        asyncio.run(_run(server, sock, on_ready))


async def _run(server: uvicorn.Server, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: _log(context["message"], context.get("exception"))
    )
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    sock.listen(QUEUE)
    on_ready()
    while not serving.done():
        for connection in list(server.server_state.connections):
            cast(LimitedProtocol, connection).close_if_due()
        await asyncio.wait([serving], timeout=WATCH_SECONDS)
    await serving


def _log(what: str, error: BaseException | None) -> None:
    note(f"cifar-lit: {what} failed: {type(error).__name__}: {str(error)[:300]}")


class App:
    """The ASGI application: who may ask, how many at a time, for how long; no exception leaves it.

    A page from elsewhere that makes its own name point here (DNS rebinding) is refused: the service answers to localhost and
    loopback addresses and, if it is not bound to this machine alone, to every address and to the `names` of this machine.
    Pages of other sites are refused in any case, and no answer allows them to read it.
    """

    def __init__(
        self, net: NetRunner, decoders: Decoders, limits: Limits, names: frozenset[str] | None, version: str
    ) -> None:
        self.net, self.decoders, self.limits, self.names = net, decoders, limits, names
        classifier = net.classifier
        self._health = {
            "status": "ok", "net": classifier.card.net, "classes": classifier.classes, "image_size": classifier.size,
            "resize": classifier.resize, "channels": classifier.channels, "device": str(classifier.net.mean.device),
            "version": version, "limits": asdict(limits),
        }  # fmt: skip
        self._pages = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._running = 0  # requests that are here as a whole and have no answer yet
        self._parsing = asyncio.Lock()
        self._held = 0  # bytes of bodies, those of each request in its scope
        self.connections: set[Any] = set()  # uvicorn's, once it runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        try:
            self._check(request)
            answer = await self._answer(request)
        except RequestError as error:
            answer = JSONResponse(
                {"error": error.text}, error.status, {"Retry-After": "1"} if error.status == 503 else None
            )
        except ClientDisconnect:
            return
        except Exception as error:
            _log(scope["path"][:80], error)
            answer = JSONResponse({"error": "the service failed on this request; its console says why"}, 500)
        answer.headers.update(HEADERS)
        await answer(scope, receive, send)

    def _check(self, request: Request) -> None:
        """Raise RequestError if the client may not ask."""
        host = ",".join(request.headers.getlist("host")).lower()  # two names are none
        if not _is_own_name(host, self.names):
            text = (
                f"this service answers to localhost, not to {host[:80]!r}: start it with --host to be reached by name"
            )
            if self.names is not None:
                text = f"this service does not answer to {host[:80]!r}: use its address, or start it with --host and that name"
            raise RequestError(400, text)
        origins = request.headers.getlist("origin")  # browsers send it with all but a GET of a page's own site
        own = (f"http://{host}", f"https://{host}")  # behind a proxy for TLS it is https
        if request.method not in ("GET", "HEAD") and any(one not in own for one in origins):
            text = "pages of other sites may not use this service: ask it from its own page, or from a program"
            raise RequestError(403, text)

    async def _answer(self, request: Request) -> Response:
        path, method = request.scope["path"], request.method
        if path not in (*self._pages, "/health", "/predict"):
            raise RequestError(
                404, f"there is nothing at {quote(path[:80])}: POST /predict, GET /health, or the page at /"
            )
        allowed = "POST" if path == "/predict" else "GET"
        if method != allowed and (allowed, method) != ("GET", "HEAD"):
            raise RequestError(405, f"{path} does not take {method[:20]}: use {allowed}")
        if path in self._pages:
            content, kind = self._pages[path]
            packed = "gzip" in request.headers.get("accept-encoding", "")
            encoding = {"Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if packed else {})}
            return Response(gzip.compress(content) if packed else content, 200, encoding, kind)
        return JSONResponse(self._health if path == "/health" else await self._predict(request))

    async def _predict(self, request: Request) -> dict[str, Any]:
        """The JSON of a prediction, of a list of them where the request holds a form or a list."""
        top, seen = self._top(request.query_params.get("top")), request.query_params.get("seen") in ("1", "true")
        self._check_size(int(request.headers.get("content-length", "0")))
        chunks, size, scope = [], 0, request.scope
        try:
            async for chunk in request.stream():
                self._check_size(size + len(chunk))
                size += len(chunk)
                scope["held"] = scope.get("held", 0) + len(chunk)
                self._held += len(chunk)
                if size > SMALL_BODY_BYTES and self._held > max(MAX_HELD_BYTES, 2 * self.limits.body):
                    self._make_room(scope)
                chunks.append(chunk)
            if self._running >= self.limits.requests:
                raise RequestError(503, f"more than {self.limits.requests} requests at a time: send it again later")
            self._running += 1
            try:
                async with asyncio.timeout(self.limits.answer_seconds):
                    kind = request.headers.get("content-type", "")
                    async with self._parsing:  # by one thread, as there are copies meanwhile
                        body = b"".join(chunks)
                        chunks.clear()
                        images = await asyncio.to_thread(parse_body, kind, body, self.limits)
                        del body
                    pixels = await self.decoders.decode(images.files)
                    predictions = await self.net.predict(NetRequest(pixels, top, seen))
            finally:
                self._running -= 1
        except TimeoutError:
            limit = f"{self.limits.answer_seconds:g} s"
            raise RequestError(
                503, f"there was no answer within {limit}: the service is busy, try again later"
            ) from None
        finally:
            self._held -= scope.pop("held", 0)
        return {"predictions": predictions} if images.many else predictions[0]

    def _make_room(self, scope: Scope) -> None:
        """Drops the slowest of the large requests that are still coming; raises RequestError where this is one of them."""
        coming = [one for one in self.connections if one.part == "body" and one.scope.get("held", 0) > SMALL_BODY_BYTES]
        last = slowest(coming, 1 + len(coming) // 32)
        for one in last:
            if one.scope is not scope:
                self._held -= one.scope.pop("held")
                one.refuse(503, TOO_MUCH)
        if not last or any(one.scope is scope for one in last):
            raise RequestError(503, TOO_MUCH)

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
            raise RequestError(
                413, f"the body is larger than {limit}: send less, or start the service with a larger --max-mb"
            )


def _is_own_name(host: str, names: frozenset[str] | None) -> bool:
    """Return whether a Host header names this machine, with any port.

    Whoever answers for a name says where it leads, so no other name is accepted, not even *.localhost. An address leads to
    itself: all are accepted unless the service is bound to this machine alone (`names` is None).
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
