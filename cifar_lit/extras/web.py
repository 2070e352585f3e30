"""What the commands with a page share: checks of each request, files of the page, errors as JSON, and the server."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.text import note, printable

HEADERS = {  # in every response
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STYLE = Path(__file__).parent / "page.css"
HOST = re.compile(r"(?:\[([0-9a-f:]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")
MAX_HEADER_BYTES = 16 * 1024  # the limit of Node.js
STOP_SECONDS = 5  # for running requests to be answered when the service stops
ACCEPTED_AT_ONCE = 64  # connections per turn of the loop; with more, some would be dropped before they are read


def application(routes: Sequence[Route], page: Path, names: frozenset[str] | None = None, root: str = "") -> Starlette:
    """Return an application that checks each request and answers every error with `{"error": "one line"}`.

    Args:
        page: folder with index.html and its files. All pages share `page.css`.
        names: names of this machine that clients may use; None if the socket is bound to a loopback address.
    """
    files = [_file_route(file) for file in (STYLE, *page.iterdir())]
    return Starlette(
        routes=[Mount(root, routes=[*routes, *files])],
        middleware=[Middleware(OwnClients, names=names)],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _ignore, Exception: _report},
    )


def _file_route(file: Path) -> Route:
    async def send(request: Request) -> Response:
        return FileResponse(file)

    if file.name == "index.html":
        return Route("/", send)
    return Route(f"/{file.name}", send)


class OwnClients:
    """Middleware that refuses other host names, which prevents DNS rebinding, and posts from pages of other sites.

    Starlette's TrustedHostMiddleware has only names. Here every address is valid too, unless `names` is None: no
    stranger can point an address to this machine. No response has CORS headers.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        headers = Headers(scope=scope)
        host = ",".join(headers.getlist("host")).lower()  # two headers make an invalid name
        # Browsers send Origin, except with a GET from a page of the same site. Behind a TLS proxy it is https.
        is_own_page = {*headers.getlist("origin")} <= {f"http://{host}", f"https://{host}"}
        answer = self.app
        if not self._is_own_name(host):
            remedy = "use the address that the console shows, or start it with --host and that name"
            answer = error_response(400, f"this service does not answer to {host[:80]!r}: {remedy}")
        elif scope["method"] not in ("GET", "HEAD") and not is_own_page:
            answer = error_response(
                403, "pages of other sites may not use this service: use its own page, or a program"
            )
        await answer(scope, receive, send)

    def _is_own_name(self, host: str) -> bool:
        """Return whether a Host header, with any port, names this machine. Strangers may own other *.localhost."""
        match = HOST.fullmatch(host)
        if not match:
            return False
        name = match[1] or match[2]
        if name == "localhost" or name in (self.names or ()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.names is not None or address.is_loopback


async def read_body(request: Request, limit: int, remedy: str) -> bytes:
    """Return the body of a request. Raise HTTPException if it is larger than `limit` bytes."""
    if "transfer-encoding" in request.headers:  # parsing each small piece of a body takes time
        raise HTTPException(411, "bodies in chunks are not accepted: send a Content-Length", {"Connection": "close"})
    if int(request.headers.get("content-length", "0")) > limit:
        raise HTTPException(413, f"the body is larger than {limit / 1e6:g} MB: {remedy}")
    return await request.body()


def error_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as JSON."""
    return JSONResponse({"error": printable(text)}, status, headers)  # UTF-8 has no surrogates


async def _refuse(request: Request, error: Exception) -> Response:
    """Return an HTTPException as JSON. Those of Starlette's router get a text of ours."""
    assert isinstance(error, HTTPException)
    path, text = quote(request.scope["path"][:80]), error.detail
    if text == "Not Found":
        text = f"there is nothing at {path}: use the page at /, or the address that the console shows"
    elif text == "Method Not Allowed":
        allowed = " or ".join(sorted((error.headers or {})["Allow"].split(", ")))
        text = f"{path} does not take {request.method[:20]}: use {allowed}"
    return error_response(error.status_code, text, error.headers)


async def _ignore(request: Request, error: Exception) -> Response:
    return Response()  # nobody receives it


async def _report(request: Request, error: Exception) -> Response:
    note(f"cifar-lit: {request.scope['path'][:80]} failed: {type(error).__name__}: {str(error)[:300]}")
    return error_response(500, "the service failed on this request; its console says why")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise UsageError or Failure if it cannot be opened."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: accepts IPv4 too
        sock = socket.create_server(address, family=family, backlog=512, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise Failure(f"port {port} is in use: choose another with --port, or --port 0 for a free one") from None
        remedy = "use 127.0.0.1 (this machine only) or 0.0.0.0 (every network interface), and a port above 1023"
        raise UsageError(f"--host {host} --port {port} cannot be used ({first_line(error)}): {remedy}") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # for all connections: Nagle would delay answers 40 ms
    return sock


class Server(uvicorn.Server):
    """uvicorn's server. It also stops at SIGHUP, ends with exit code 0, and calls `on_ready` when it has started.

    http: class of the connections, uvicorn's by default.
    """

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None], http: Any = "h11") -> None:
        config = uvicorn.Config(
            app, http=http, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
            server_header=False, proxy_headers=False, headers=[*HEADERS.items()], backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=STOP_SECONDS, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        super().__init__(config)
        self.on_ready = on_ready

    def answer(self, sock: socket.socket) -> None:
        """Answer requests until Ctrl-C, SIGTERM or SIGHUP. Running requests are still answered."""
        asyncio.run(self.serve([sock]))

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
        await super().startup(sockets)
        self.on_ready()
