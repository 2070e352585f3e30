"""What computes for a service: processes that decode images, each of which can be ended, and the net on a thread of its own.

An image that takes too long, or brings its decoder down, harms nobody else. Decoding processes import no torch: one takes about
30 MB and a quarter of a second to start.
"""

from __future__ import annotations

import asyncio
import base64
import io
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from cifar_lit.data.decode import DecodeError, decode, start_worker, submit_without_main
from cifar_lit.hardware import core_count
from cifar_lit.inference.serve.bodies import Limits, RequestError
from cifar_lit.signals import STOP_SIGNALS, start_resource_tracker

if TYPE_CHECKING:
    from cifar_lit.inference.load import Classifier

MAX_BATCH_IMAGES = 64  # and those that a request of more brings along

HAS_CPU_TIMER = hasattr(signal, "setitimer")  # not on Windows, where a request ends after `answer_seconds` only

# ---- Decoding.

Files = list[tuple[str, bytes]]  # of a request, each with its name


class Decoder:
    """A process that decodes the images of one request at a time."""

    def __init__(self, max_pixels: int) -> None:
        before = {process.pid for process in active_children()}
        with _signals_blocked():
            self._executor = ProcessPoolExecutor(
                1, get_context("spawn"), initializer=start_worker, initargs=(max_pixels,)
            )
            self.ready = submit_without_main(self._executor, int)  # which does nothing
        self._process = next(process for process in active_children() if process.pid not in before)

    async def decode(
        self, files: Files, size: tuple[int, int], channels: int, resize: str, seconds: float
    ) -> list[bytes]:
        """(H, W, C) uint8 in one row of each; raises DecodeError, and BrokenProcessPool where the process died."""
        return await asyncio.wrap_future(self._executor.submit(_decode, files, size, channels, resize, seconds))

    def kill(self) -> bool:
        """Ends the process; what it computes is not waited for. Returns whether it had used up its time already."""
        self._process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)
        return HAS_CPU_TIMER and self._process.exitcode == -signal.SIGPROF


def _decode(files: Files, size: tuple[int, int], channels: int, resize: str, seconds: float) -> list[bytes]:
    """Runs in the process, which a signal ends when its time is over: decoders can't be interrupted in any other way."""
    _set_cpu_timer(seconds)
    try:
        return [decode(_file(name, data), size, channels, resize).tobytes() for name, data in files]
    finally:
        _set_cpu_timer(0)


def _file(name: str, data: bytes) -> io.BytesIO:
    file = io.BytesIO(data)
    file.name = name  # by which errors call it
    return file


def _set_cpu_timer(seconds: float) -> None:
    """Ends this process when it has computed for so long, 0 for never."""
    if HAS_CPU_TIMER:
        signal.setitimer(signal.ITIMER_PROF, seconds)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that stop the service while processes start: they reach all at once, and this process answers."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    start_resource_tracker()  # its start below would unblock the signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Decoders:
    """Two to four decoding processes; one that died or was ended is started again."""

    def __init__(self, size: tuple[int, int], channels: int, resize: str, limits: Limits) -> None:
        self.count = max(2, min(4, core_count()))
        self._size, self._channels, self._resize, self._limits = size, channels, resize, limits
        self._decoders = {Decoder(limits.pixels) for _ in range(self.count)}
        self._idle: asyncio.Queue[Decoder] = asyncio.Queue()
        for decoder in self._decoders:
            decoder.ready.result()
            self._idle.put_nowait(decoder)

    async def decode(self, files: Files) -> list[bytes]:
        """The pixels of a request's images, (H, W, C) uint8 in one row each; raises RequestError, which names the bad one."""
        decoder = await self._idle.get()
        try:
            await asyncio.wrap_future(decoder.ready)
            return await decoder.decode(files, self._size, self._channels, self._resize, self._limits.decode_seconds)
        except DecodeError as error:
            if error.reason.endswith(" pixels"):
                text = (
                    f"{error.name} has {error.reason}: make it smaller, or start the service with a larger --max-pixels"
                )
            else:
                text = f"{error.name} cannot be read: {error.reason}; save or send it again"
            raise RequestError(422, text) from None
        except BaseException as error:
            self._decoders.remove(decoder)
            out_of_time = decoder.kill()
            decoder = Decoder(self._limits.pixels)
            self._decoders.add(decoder)
            if isinstance(error, BrokenProcessPool):  # else nobody waits for the answer any more
                which = f"{files[0][0]} takes" if len(files) == 1 else f"{len(files)} images take"
                limit = f"{self._limits.decode_seconds:g} s"
                text = f"{which} longer than {limit} to decode: save it again, smaller or as a plain JPEG, or send less at a time"
                lost = "the decoder did not survive what was sent: save it again, as a plain JPEG"
                raise RequestError(422, text if out_of_time else lost) from None
            raise
        finally:
            self._idle.put_nowait(decoder)

    def close(self) -> None:
        """Ends the processes."""
        for decoder in self._decoders:
            decoder.kill()


# ---- The net.


class NetRequest(NamedTuple):
    """The images of a request, H·W·C bytes each; how many classes to name, and whether to show the images as they are here."""

    pixels: list[bytes]
    top: int
    seen: bool


Answer = list[dict[str, Any]]


class NetRunner:
    """A classifier that takes as one batch what has come in while it was at work."""

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self._thread = ThreadPoolExecutor(1)  # always the same: torch starts its own threads for each that computes
        self._turn = asyncio.Lock()
        self._waiting: deque[tuple[NetRequest, asyncio.Future[Answer]]] = deque()
        blank = bytes(classifier.size[0] * classifier.size[1] * classifier.channels)
        self._thread.submit(self._predict, [NetRequest([blank], 1, False)]).result()  # the first run takes longer

    async def predict(self, request: NetRequest) -> Answer:
        """The JSON of a prediction for each image."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        try:
            async with self._turn:
                batch: list[tuple[NetRequest, asyncio.Future[Answer]]] = []
                while self._waiting and sum(len(one.pixels) for one, _ in batch) < MAX_BATCH_IMAGES:
                    batch.append(self._waiting.popleft())
                if batch := [pair for pair in batch if not pair[1].done()]:
                    await asyncio.shield(self._answer(batch))  # others wait for it too
            return await answer
        finally:
            answer.cancel()  # where the client was told that it takes too long

    async def _answer(self, batch: list[tuple[NetRequest, asyncio.Future[Answer]]]) -> None:
        requests = [request for request, _ in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._predict, requests)
        except Exception as error:
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
        else:
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if not waiting.done():
                    waiting.set_result(answer)

    def _predict(self, batch: list[NetRequest]) -> list[Answer]:
        """For each request the JSON of its predictions, from one run of the net."""
        import torch

        pixels = bytearray().join(data for request in batch for data in request.pixels)
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, *self.classifier.size, self.classifier.channels)
        predictions = self.classifier.predict_batch(images.permute(0, 3, 1, 2), max(request.top for request in batch))
        results = zip(predictions, images.numpy(), strict=True)
        answers: list[Answer] = []
        for request in batch:
            answers.append([])
            for _ in request.pixels:
                prediction, view = next(results)
                best = [
                    {"label": label, "probability": round(value, 6)} for label, value in prediction.top[: request.top]
                ]
                entry = {**best[0], "top": best}
                if request.seen:
                    file = io.BytesIO()
                    Image.fromarray(view[:, :, 0] if view.shape[2] == 1 else view).save(file, "PNG")
                    entry["seen"] = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
                answers[-1].append(entry)
        return answers
