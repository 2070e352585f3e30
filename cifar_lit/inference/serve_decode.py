"""Decoding in processes of its own, so that an image that takes too long, or brings its decoder down, harms nobody else.

Imports no torch: a decoding process takes about 30 MB and a quarter of a second to start.
"""

from __future__ import annotations

import asyncio
import io
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType

from cifar_lit.data.decode import DecodeError, decode, start_worker
from cifar_lit.inference.serve_requests import Limits, Refused

START_SECONDS = 60.0  # for a decoding process to come up on a machine that is busy


def decoding(pipe: Connection, size: tuple[int, int], channels: int, pixels: int) -> None:
    """What a decoding process does: a file's bytes in; True and its pixels, or False and the reason, out."""
    start_worker(pixels)
    pipe.send((True, b""))  # here we are
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            pipe.send((True, decode(io.BytesIO(data), size, channels).tobytes()))
        except DecodeError as error:
            pipe.send((False, error.reason))
        except MemoryError:
            pipe.send((False, "it needs more memory than there is"))


@contextmanager
def no_signals() -> Iterator[None]:
    """For starting processes: they inherit that Ctrl-C and SIGTERM are held back, and so are left to this process alone.

    A terminal's Ctrl-C and a service manager's SIGTERM reach them all at once, and requests that run could not be answered.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started in here, it would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Decoder:
    """One decoding process and our end of its pipe."""

    def __init__(self, settings: tuple[tuple[int, int], int, int]) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=decoding, args=(theirs, *settings), name="decoder", daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a spawned process would run the main script again
        try:
            with no_signals():
                self.process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()

    def wait(self) -> bool:
        """Whether it came up."""
        try:
            return self.pipe.poll(START_SECONDS) and bool(self.pipe.recv()[0])
        except (EOFError, OSError):
            return False

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class Decoders:
    """Decoding processes, each taking one image at a time.

    count: of processes. size: (H, W) of the net's images. channels: 3 or 1.
    """

    def __init__(self, count: int, size: tuple[int, int], channels: int, limits: Limits) -> None:
        self.count, self.limits = count, limits
        self._settings = (size, channels, limits.pixels)
        self._free: queue.SimpleQueue[_Decoder | None] = queue.SimpleQueue()
        self._all: set[_Decoder] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(count, "decoder")
        for started in [self._started() for _ in range(count)]:
            if started is not None and started.wait():
                self._free.put(started)
        if self._free.empty():
            self.close()
            raise RuntimeError("no process for decoding images could be started")

    def _started(self) -> _Decoder | None:
        with self._lock:
            if self._closed:
                return None
            decoder = _Decoder(self._settings)
            self._all.add(decoder)
            return decoder

    async def decode(self, name: str, data: bytes) -> bytes:
        """The pixels of an image, (H, W, C) uint8 in one row; raises Refused, `name` saying which image."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, name, data)

    def _decode(self, name: str, data: bytes) -> bytes:
        decoder = self._free.get()
        if decoder is None:
            raise Refused(503, "the service is stopping: send the image again later")
        try:
            decoder.pipe.send_bytes(data)
            if not decoder.pipe.poll(self.limits.decode_seconds):
                self._replace(decoder)
                seconds = f"{self.limits.decode_seconds:g} s"
                raise Refused(422, f"{name} takes longer than {seconds} to decode: save it again, smaller or as a plain JPEG")
            good, found = decoder.pipe.recv()
        except (EOFError, OSError):
            self._replace(decoder)
            raise Refused(422, f"{name} cannot be decoded, it brought the decoder down: save it again") from None
        self._free.put(decoder)
        if good:
            return bytes(found)
        if found.endswith(" pixels"):
            raise Refused(422, f"{name} has {found}: make it smaller, or start the service with a larger --max-pixels")
        raise Refused(422, f"{name} cannot be read: {found}; save or send it again")

    def _replace(self, decoder: _Decoder) -> None:
        """Kills a process and starts another beside what goes on."""
        decoder.kill()
        with self._lock:
            self._all.discard(decoder)

        def start() -> None:
            other = self._started()
            if other is not None and other.wait():
                self._free.put(other)

        threading.Thread(target=start, daemon=True).start()

    def close(self) -> None:
        """Ends the processes; what is being decoded is not waited for."""
        with self._lock:
            self._closed = True
            for decoder in self._all:
                decoder.process.kill()
                decoder.process.join()
        for _ in range(self.count):  # for threads that wait for a process
            self._free.put(None)
        self._threads.shutdown(wait=False, cancel_futures=True)
