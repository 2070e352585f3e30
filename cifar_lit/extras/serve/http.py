"""The service over HTTP: the page, its health and predictions. Errors are JSON: `{"error": "one line"}`."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from cifar_lit.extras.serve.bodies import Limits, RequestError, parse_body
from cifar_lit.extras.serve.collect import Collector
from cifar_lit.extras.serve.connections import slowest
from cifar_lit.extras.serve.service import Service
from cifar_lit.extras.serve.workers import Decoders, NetRequest, NetRunner
from cifar_lit.hardware import keep_freed_memory
from cifar_lit.inference.load import Classifier
from cifar_lit.signals import stop_signals
from cifar_lit.threads import choose_threads

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
DEFAULT_TOP = 3
MAX_HELD_BYTES = 256_000_000  # all bodies in memory together; at least two of the largest size
SMALL_BODY_BYTES = 64_000  # smaller bodies are always accepted
TOO_MUCH = "the service holds too many large requests: try again later"


def serve(
    classifier: Classifier, sock: socket.socket, names: frozenset[str] | None, limits: Limits, version: str,
    on_ready: Callable[[], None], collector: Collector | None = None, threads: int | None = None,
) -> None:  # fmt: skip
    """Serve a net until Ctrl-C, SIGTERM or SIGHUP. Running requests are still answered.

    Args:
        classifier: the net.
        sock: a listening socket.
        names: names of this machine that clients may use; None if the socket is bound to a loopback address.
        limits: limits of a request.
        version: version of the program, for /health.
        on_ready: callback for the start of the service.
        collector: keeps uncertain pictures.
        threads: CPU threads of the net and the connections, by default the free cores.
    """
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # Leave one core to connections and decoding: torch's threads spin while they wait.
    torch.set_num_threads(max(1, choose_threads(threads)[0] - 1))
    keep_freed_memory()
    with closing(Decoders(classifier.preparation, limits)) as decoders:
        App(NetRunner(classifier, collector), decoders, limits, names, version).run(sock, limits, on_ready)


class App(Service):
    """The service of a net. It limits the number of requests and the memory of their bodies."""

    def __init__(
        self, net: NetRunner, decoders: Decoders, limits: Limits, names: frozenset[str] | None, version: str
    ) -> None:
        super().__init__(names)
        self.net, self.decoders, self.limits = net, decoders, limits
        classifier = net.classifier
        self._health = {
            "status": "ok", "net": classifier.card.net, "classes": classifier.classes,
            "image_size": classifier.preparation.size, "resize": classifier.preparation.resize,
            "channels": classifier.preparation.channels, "device": str(classifier.net.mean.device),
            "version": version, "limits": asdict(limits), "collects": net.collector is not None,
        }  # fmt: skip
        # In memory: an open file per slow reader would use up the file descriptors.
        self._pages = {path: ((PAGE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._running = 0  # requests that have arrived completely and have no answer yet
        self._parsing = asyncio.Lock()
        self._held = 0  # bytes of all bodies in memory; `scope["held"]` counts those of one request

    async def answer(self, request: Request) -> Response:
        """Return a file of the page, the health of the service, or predictions."""
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
