"""`serve`: a run's net behind HTTP. One process for the net (LitServe's), some for decoding, this one for the connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import litserve as ls
import uvicorn
from litserve.utils import LitAPIStatus, wrap_litserve_start
from starlette.exceptions import HTTPException

from cifar_lit.errors import Failure
from cifar_lit.inference.serve_app import Reader, furnish
from cifar_lit.inference.serve_decode import Decoders, no_signals
from cifar_lit.inference.serve_net import Facts, NetAPI
from cifar_lit.inference.serve_protocol import PatientProtocol
from cifar_lit.inference.serve_requests import Limits

STOP_SECONDS = 5  # in which requests that run are answered when the service is stopped
_DIED = "the net's process ended (signal 9 would mean that the machine ran out of memory)"


def serve(
    path: str,
    listening: socket.socket,
    local: bool,
    accelerator: str,
    limits: Limits,
    version: str,
    ready: Callable[[Facts], None],
) -> None:
    """Serves the net of a run until Ctrl-C or SIGTERM; requests that run then are answered first.

    path: a run's folder or its model.safetensors. listening: a bound socket. local: whether it is bound to this machine alone.
    accelerator: as for `device_named`. version: told by /health. ready: called when requests are answered.
    Raises UsageError and Failure when the net cannot be loaded, Failure when it cannot be loaded again after its process died.
    """
    signal.signal(signal.SIGTERM, _stop_at_once)
    with ExitStack() as stack:
        hear, tell = get_context("spawn").Pipe(duplex=False)
        api = NetAPI(path, accelerator, tell)
        # "cpu" keeps LitServe from looking for GPUs: the net's process picks its device. LitServe's own pages, left out here,
        # would load scripts from elsewhere.
        server = ls.LitServer(api, accelerator="cpu", timeout=False, disable_openapi_url=True)
        with no_signals():
            stack.enter_context(wrap_litserve_start(server))
            stack.callback(_kill, server)
        facts = _heard(hear, server)
        decoders = Decoders(max(2, min(4, os.cpu_count() or 1)), facts.size, facts.channels, limits)
        stack.callback(decoders.close)
        app = server.app
        app.state.ready, app.state.reader = True, Reader(facts, decoders, limits)
        furnish(app, facts, limits, local, version)
        protocol = type("Protocol", (PatientProtocol,), {"seconds": limits.body_seconds})
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        service = _Service(config, server, api, hear, lambda: ready(facts))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # uvicorn hears them first, and tells us when it has ended
        service.run([listening])
        if service.failure is not None:
            raise service.failure


def _stop_at_once(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _kill(server: ls.LitServer) -> None:
    """Ends the net's process, which SIGTERM does not reach; every request has its answer by now."""
    for process in server.inference_workers:
        process.kill()
        process.join()


def _heard(hear: Connection, server: ls.LitServer) -> Facts:
    """What the net's process says when it is up; raises what kept it from that."""
    while not hear.poll(0.1):
        if not server.inference_workers[0].is_alive() and not hear.poll(0.1):
            raise Failure(f"{_DIED} before it was ready")
    told: Facts | Exception = hear.recv()
    if isinstance(told, Exception):
        raise told
    return told


class _Service(uvicorn.Server):
    """uvicorn that says when it is ready, and that starts the net's process again when it died."""

    def __init__(
        self, config: uvicorn.Config, server: ls.LitServer, api: NetAPI, hear: Connection, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._server, self._api, self._hear, self._ready = server, api, hear, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then says so."""
        await super().startup(sockets)
        self._watch = asyncio.create_task(self._watched())
        self._ready()

    async def _watched(self) -> None:
        state: Any = self._server.app.state
        while True:
            await asyncio.sleep(0.2)
            alive = self._server.inference_workers[0].is_alive()
            if state.ready and not alive:
                state.ready = False
                self._refuse_waiting()
                with no_signals():
                    self._server.inference_workers[0] = self._server.launch_single_inference_worker(self._api, 0)
            elif not state.ready and self._hear.poll():
                told = self._hear.recv()
                state.ready = isinstance(told, Facts)
                if not state.ready:
                    self._give_up(told)
            elif not state.ready and not alive:
                self._give_up(Failure(f"{_DIED}, and again while it was loaded"))

    def _refuse_waiting(self) -> None:
        for item in self._server.response_buffer.values():
            item.response = (HTTPException(503, f"{_DIED}: send the request again in some seconds"), LitAPIStatus.ERROR)
            item.event.set()

    def _give_up(self, failure: Exception) -> None:
        self.failure = failure
        self.should_exit = True
