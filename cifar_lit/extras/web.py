"""What the commands with a page share: its files, errors as JSON, and the server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

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


THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")  # names by which a browser reaches its own machine


def application(routes: Sequence[BaseRoute], page: Path, names: Sequence[str], root: str = "") -> Starlette:
    """Return an application that answers every error with `{"error": "one line"}`.

    Args:
        page: folder with index.html and its files. All pages share `page.css`.
        names: host names and addresses that clients may use, because a page of another site can make its own name point
            here (DNS rebinding); * for any. No response has CORS headers.
        root: the path of the page.
    """
    style = Path(__file__).parent / "page.css"
    files = [
        Route("/page.css", lambda request: FileResponse(style)),
        Mount("/", StaticFiles(directory=page, html=True)),
    ]
    return Starlette(
        routes=[Mount(root, routes=[*routes, *files])],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names)],
        exception_handlers={HTTPException: _refuse, Exception: _report},
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def _report(request: Request, error: Exception) -> Response:
    note(f"cifar-lit: {request.url.path} failed: {type(error).__name__}: {error}")
    return JSONResponse({"error": "the service failed on this request; its console says why"}, 500)


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
