"""What the service answers: the page, its health, predictions, and errors as `{"error": "one line"}`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cifar_lit.inference.serve_decode import Decoders
from cifar_lit.inference.serve_net import Facts
from cifar_lit.inference.serve_requests import Limits, Refused, asked_for, megabytes

PAGE = Path(__file__).parent / "serve_page"
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
BODIES = 16  # as many full-sized bodies are held at a time
DEFAULT_TOP = 3
AT_ONCE = 100_000  # bytes of a body that are taken apart in less time than a thread takes to be asked


def error(status: int, text: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer with one line that says what is wrong."""
    return JSONResponse({"error": text}, status, {**(headers or {}), **({"Retry-After": "1"} if status == 503 else {})})


class Reader:
    """From a request to what the net's process takes: {"pixels": (H·W·C bytes of each image), "top", "seen", "many"}."""

    def __init__(self, facts: Facts, decoders: Decoders, limits: Limits) -> None:
        self.facts, self.decoders, self.limits = facts, decoders, limits
        self._held = 0  # bytes of bodies

    async def __call__(self, request: Request) -> dict[str, Any]:
        """Raises Refused for whatever is wrong with the request."""
        top, seen = self._top(request.query_params.get("top")), request.query_params.get("seen") in ("1", "true")
        held = 0
        try:
            body = bytearray()
            self._check_size(int(request.headers.get("content-length", "0")))
            async for chunk in request.stream():
                self._check_size(len(body) + len(chunk))
                body += chunk
                held += len(chunk)
                self._held += len(chunk)
                if self._held > BODIES * self.limits.body:
                    raise Refused(503, "too much is being sent at once: send it again later")
            clock: asyncio.Timeout = request.scope["clock"]
            clock.reschedule(asyncio.get_running_loop().time() + self.limits.answer_seconds)
            question = (request.headers.get("content-type", ""), bytes(body), self.limits)
            asked = asked_for(*question) if len(body) < AT_ONCE else await asyncio.to_thread(asked_for, *question)
            pixels: list[bytes] = []
            for start in range(0, len(asked.files), self.decoders.count):  # in turns, so that a batch leaves room for others
                some = asked.files[start : start + self.decoders.count]
                pixels += await asyncio.gather(*(self.decoders.decode(name, data) for name, data in some))
        finally:
            self._held -= held
        return {"pixels": pixels, "top": top, "seen": seen, "many": asked.many}

    def _check_size(self, size: int) -> None:
        if size > self.limits.body:
            most = megabytes(self.limits.body)
            raise Refused(413, f"the body is larger than {most}: send less, or start the service with a larger --max-mb")

    def _top(self, text: str | None) -> int:
        count = len(self.facts.classes)
        if text is None:
            return min(DEFAULT_TOP, count)
        if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
            raise Refused(422, f"top must be a whole number from 1 to {count}, not {text[:20]!r}")
        return min(int(text), count)


class Guard:
    """ASGI around everything: who may ask, how many at a time, for how long; no exception leaves it.

    local: whether the service is bound to this machine alone. It then answers only to names of this machine: a page from
    elsewhere that makes its own name point here (DNS rebinding) is refused. Pages of other sites are refused in any case,
    and no answer allows them to read it.
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

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._running += 1
        try:
            self._check(scope)
            async with asyncio.timeout(None) as scope["clock"]:
                await self.app(scope, receive, noted)
            return
        except Refused as refused:
            answer = error(refused.status, refused.text)
        except ClientDisconnect:
            return
        except TimeoutError:
            answer = error(
                503, f"there was no answer within {self.limits.answer_seconds:g} s: the service is busy, try again later"
            )
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
            raise Refused(
                400, f"this service answers to localhost, not to {host[:80]!r}: start it with --host to be reached by name"
            )
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get(b"origin")
            if origin is not None and urlsplit(origin).netloc != host:
                raise Refused(403, "pages of other sites may not use this service: ask it from its own page, or from a program")
            if not self.state.ready:
                raise Refused(503, "the net is being loaded again: send the request again in some seconds")
            if self._running > self.limits.requests:
                raise Refused(503, f"more than {self.limits.requests} requests at a time: send it again later")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "::1") or name.endswith(".localhost") or (name.startswith("127.") and name.count(".") == 3)


def furnish(app: FastAPI, facts: Facts, limits: Limits, local: bool, version: str) -> None:
    """Gives LitServe's app our page, health and errors; of its own routes only POST /predict stays."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) == "/predict"]
    app.router.redirect_slashes = False
    contents = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def page(request: Request) -> Response:
        content, kind = contents[request.url.path]
        return Response(content, 200, HEADERS, kind)

    about = {
        "status": "ok",
        "net": facts.net,
        "classes": list(facts.classes),
        "image_size": list(facts.size),
        "channels": facts.channels,
        "device": facts.device,
        "version": version,
        "limits": asdict(limits),
    }

    async def health(request: Request) -> Response:
        return JSONResponse(about) if app.state.ready else error(503, "the net is being loaded again")

    for path in FILES:
        app.add_route(path, page, ["GET"])
    app.add_route("/health", health, ["GET"])

    async def told(request: Request, fault: Exception) -> Response:
        if isinstance(fault, Refused):
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

    app.add_exception_handler(Refused, told)
    app.add_exception_handler(HTTPException, told)
    app.add_middleware(Guard, state=app.state, limits=limits, local=local)
