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
from cifar_lit.inference.serve.http import TimeoutProtocol, set_up_app
from cifar_lit.inference.serve.images import DecoderPool, Limits, signals_blocked
from cifar_lit.inference.serve.net import ModelInfo, NetAPI

STOP_SECONDS = 5  # in which requests that run are answered when the service is stopped
_DIED = "the net's process ended (signal 9 would mean that the machine ran out of memory)"


def serve(
    path: str,
    sock: socket.socket,
    local: bool,
    accelerator: str,
    limits: Limits,
    version: str,
    on_ready: Callable[[ModelInfo], None],
) -> None:
    """Serves the net of a run until Ctrl-C or SIGTERM; requests that run then are answered first.

    Args:
        path: a run's folder or its model.safetensors.
        sock: a bound socket; `local` if it is bound to this machine alone.
        accelerator: as for `resolve_device`.
        on_ready: called when requests are answered.

    Raises:
        UsageError: there is no such accelerator.
        Failure: the net cannot be loaded, at first or again after its process died.
    """
    signal.signal(signal.SIGTERM, _exit)
    with ExitStack() as stack:
        receiver, sender = get_context("spawn").Pipe(duplex=False)
        api = NetAPI(path, accelerator, sender)
        # "cpu" keeps LitServe from looking for GPUs: the net's process picks its device. LitServe's own pages, left out here,
        # would load scripts from elsewhere.
        server = ls.LitServer(api, accelerator="cpu", timeout=False, disable_openapi_url=True)
        with signals_blocked():
            stack.enter_context(wrap_litserve_start(server))
            stack.callback(_kill, server)
        info = _receive_info(receiver, server)
        decoders = DecoderPool(max(2, min(4, os.cpu_count() or 1)), info.size, info.channels, limits)
        stack.callback(decoders.close)
        set_up_app(server.app, info, decoders, limits, local, version)
        protocol = type("Protocol", (TimeoutProtocol,), {"seconds": limits.body_seconds})
        config = uvicorn.Config(
            server.app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        service = _Service(config, server, api, receiver, lambda: on_ready(info))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # uvicorn hears them first, and raises them again when it has ended
        service.run([sock])
        if service.failure is not None:
            raise service.failure


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _kill(server: ls.LitServer) -> None:
    """Ends the net's process, which SIGTERM does not reach; every request has its answer by now."""
    for process in server.inference_workers:
        process.kill()
        process.join()


def _receive_info(receiver: Connection, server: ls.LitServer) -> ModelInfo:
    """What the net's process sends when it is up; raises what kept it from that."""
    while not receiver.poll(0.1):
        if not server.inference_workers[0].is_alive() and not receiver.poll(0.1):
            raise Failure(f"{_DIED} before it was ready")
    message: ModelInfo | Exception = receiver.recv()
    if isinstance(message, Exception):
        raise message
    return message


class _Service(uvicorn.Server):
    """uvicorn that says when it is ready, and that starts the net's process again when it died."""

    def __init__(
        self, config: uvicorn.Config, server: ls.LitServer, api: NetAPI, receiver: Connection, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._server, self._api, self._receiver, self._on_ready = server, api, receiver, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, then says so."""
        await super().startup(sockets)
        self._watcher = asyncio.create_task(self._watch())
        self._on_ready()

    async def _watch(self) -> None:
        state: Any = self._server.app.state
        while True:
            await asyncio.sleep(0.2)
            alive = self._server.inference_workers[0].is_alive()
            if state.ready and not alive:
                state.ready = False
                self._refuse_waiting()
                with signals_blocked():
                    self._server.inference_workers[0] = self._server.launch_single_inference_worker(self._api, 0)
            elif not state.ready and self._receiver.poll():
                message = self._receiver.recv()
                state.ready = isinstance(message, ModelInfo)
                if not state.ready:
                    self._give_up(message)
            elif not state.ready and not alive:
                self._give_up(Failure(f"{_DIED}, and again while it was loaded"))

    def _refuse_waiting(self) -> None:
        for item in self._server.response_buffer.values():
            item.response = (HTTPException(503, f"{_DIED}: send the request again in some seconds"), LitAPIStatus.ERROR)
            item.event.set()

    def _give_up(self, failure: Exception) -> None:
        self.failure = failure
        self.should_exit = True
