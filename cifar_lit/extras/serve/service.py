"""The part of an HTTP service that does not depend on its content: server, checks of each request, headers, errors."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cifar_lit.extras.serve.bodies import Limits, RequestError
from cifar_lit.extras.serve.connections import LimitedProtocol, connection_limit
from cifar_lit.signals import HANGUP, accept_hangup, stop_signals
from cifar_lit.text import note, printable

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


class Service:
    """An ASGI application that checks the origin of requests and answers every exception.

    The Host header must be localhost or a loopback address, which prevents DNS rebinding. If the service is not bound
    to a loopback address, every address and the `names` of this machine are valid too. Requests from pages of other
    sites are refused, and no response has CORS headers.

    Args:
        names: names of this machine that clients may use; None if the socket is bound to a loopback address.
    """

    def __init__(self, names: frozenset[str] | None) -> None:
        self.names = names
        self.connections: set[Any] = set()

    async def answer(self, request: Request) -> Response:
        """Return the answer to a checked request. Raise RequestError to refuse it."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        try:
            self._check(request)
            answer = await self.answer(request)
        except RequestError as error:
            retry = {"Retry-After": "1"} if error.status == 503 else None
            answer = JSONResponse({"error": printable(error.text)}, error.status, retry)  # UTF-8 has no surrogates
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

    def run(self, sock: socket.socket, limits: Limits, on_ready: Callable[[], None]) -> None:
        """Answer requests until Ctrl-C, SIGTERM or SIGHUP. Running requests are still answered.

        Args:
            sock: a listening socket.
            limits: limits of a request.
            on_ready: callback for the start of the service.
        """
        config = uvicorn.Config(
            self, http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, limits, connection_limit())), ws="none",
            lifespan="off", log_config=None, log_level="critical", access_log=False, server_header=False,
            proxy_headers=False, backlog=ACCEPTED_AT_ONCE, timeout_graceful_shutdown=STOP_SECONDS,
        )  # fmt: skip
        server = _Server(config, on_ready)
        self.connections = server.server_state.connections
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
