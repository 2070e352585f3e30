"""What the commands with a page share: its files, checks of each request, errors as JSON, and the server."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from cifar_lit.base.errors import Failure
from cifar_lit.base.text import note

HEADERS = {  # in every response
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def application(routes: Sequence[BaseRoute], page: Path, names: Collection[str], root: str = "") -> Starlette:
    """Return an application that checks each request and answers every error with `{"error": "one line"}`.

    Args:
        page: folder with index.html and its files. All pages share `page.css`.
        names: host names that clients may use, besides addresses.
        root: the path of the page.
    """
    style = Path(__file__).parent / "page.css"
    files = [
        Route("/page.css", lambda request: FileResponse(style)),
        Mount("/", StaticFiles(directory=page, html=True)),
    ]
    return Starlette(
        routes=[Mount(root, routes=[*routes, *files])],
        middleware=[Middleware(OwnClients, names=names)],
        exception_handlers={HTTPException: _refuse, Exception: _report},
    )


class OwnClients:
    """Middleware that refuses other host names, which prevents DNS rebinding, and posts from pages of other sites.

    Starlette's TrustedHostMiddleware has only names. Here every address is valid too: no stranger can point an address
    to this machine. No response has CORS headers.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        # Browsers send Origin, except with a GET from a page of the same site. Behind a TLS proxy it is https.
        origin = headers.get("origin", f"http://{host}")
        answer = self.app
        if not self._is_own(host):
            remedy = "use the address that the console shows, or start it with --host and that name"
            answer = _error(400, f"this service does not answer to {host[:80]!r}: {remedy}")
        elif scope["method"] not in ("GET", "HEAD") and origin not in (f"http://{host}", f"https://{host}"):
            answer = _error(403, "pages of other sites may not use this service: use its own page, or a program")
        await answer(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header, with any port, has an address or one of the names."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def check_length(request: Request, limit: int) -> None:
    """Raise HTTPException for a body that is larger than `limit` bytes. It has to declare its length."""
    if int(request.headers["content-length"]) > limit:
        raise HTTPException(413, f"the body is larger than {limit / 1e6:g} MB")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _report(request: Request, error: Exception) -> Response:
    note(f"cifar-lit: {request.url.path} failed: {type(error).__name__}: {error}")
    return _error(500, "the service failed on this request; its console says why")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise Failure if it cannot be opened."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        remedy = "choose another with --port, or --port 0 for a free one"
        raise Failure(f"cannot listen on port {port} of {host}: {error.strerror}: {remedy}") from None


class Server(uvicorn.Server):
    """uvicorn's server. It ends without an error at Ctrl-C and SIGTERM, after the answers to running requests."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
                server_header=False, headers=[*HEADERS.items()], timeout_graceful_shutdown=5,
            )
        )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal. uvicorn would raise it again at the end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield
