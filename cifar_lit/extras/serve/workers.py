"""The workers of a service: processes that decode images and can be killed, and one thread that runs the net.

An image that takes too long, or crashes its decoder, affects no other request. Decoding processes do not import torch:
each takes about 30 MB and a quarter of a second to start.
"""

from __future__ import annotations

import asyncio
import base64
import io
import signal
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from cifar_lit.data.decode import DecodeError, Preparation, decode, start_worker, submit_without_main
from cifar_lit.extras.serve.bodies import Limits, RequestError
from cifar_lit.signals import STOP_SIGNALS, signals_blocked, start_resource_tracker
from cifar_lit.threads import free_cores

if TYPE_CHECKING:
    from cifar_lit.extras.serve.collect import Collector
    from cifar_lit.inference.load import Classifier

MAX_BATCH_IMAGES = 64  # a batch takes further requests below this size, so it may become larger
CPU_TIMER: int | None = getattr(signal, "SIGPROF", None)  # on Windows, only `answer_seconds` limits a request

# ---- Decoding.

Files = list[tuple[str, bytes]]  # the images of a request with their names


class Decoder:
    """A process that decodes the images of one request at a time."""

    def __init__(self, limits: Limits) -> None:
        before = {process.pid for process in active_children()}
        start_resource_tracker()  # the executor would start it, which unblocks signals
        with signals_blocked(STOP_SIGNALS):  # all processes receive them, but only this one handles them
            spawn, arguments = get_context("spawn"), (limits.pixels,)
            self._executor = ProcessPoolExecutor(1, spawn, initializer=start_worker, initargs=arguments)
            self.ready = submit_without_main(self._executor, int)  # does nothing
        self._process = next(process for process in active_children() if process.pid not in before)

    async def decode(self, files: Files, preparation: Preparation, seconds: float) -> list[bytes]:
        """Return the pixels of each image. Raise DecodeError, or BrokenProcessPool if the process died."""
        await asyncio.wrap_future(self.ready)
        return await asyncio.wrap_future(self._executor.submit(_decode, files, preparation, seconds))

    def kill(self) -> bool:
        """Kill the process without waiting for its result. Return whether its CPU timer had ended it before."""
        self._process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)
        return CPU_TIMER is not None and self._process.exitcode == -CPU_TIMER


def _decode(files: Files, preparation: Preparation, seconds: float) -> list[bytes]:
    """Decode images in the process. A signal ends it after `seconds` of CPU time: nothing else interrupts a decoder."""
    _set_cpu_timer(seconds)
    try:
        pixels = []
        for name, data in files:
            file = io.BytesIO(data)
            file.name = name  # for errors
            pixels.append(decode(file, *preparation).tobytes())
        return pixels
    finally:
        _set_cpu_timer(0)


def _set_cpu_timer(seconds: float) -> None:
    if sys.platform != "win32" and hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


class Decoders:
    """Two to four decoding processes. One that died or was killed is replaced."""

    def __init__(self, preparation: Preparation, limits: Limits) -> None:
        self._preparation, self._limits = preparation, limits
        self._decoders = {Decoder(limits) for _ in range(max(2, min(4, free_cores())))}
        self._idle: asyncio.Queue[Decoder] = asyncio.Queue()
        for decoder in self._decoders:
            decoder.ready.result()
            self._idle.put_nowait(decoder)

    async def decode(self, files: Files) -> list[bytes]:
        """Return the pixels of each image, uint8 (H, W, C). Raise RequestError for an image that cannot be decoded."""
        decoder = await self._idle.get()
        try:
            return await decoder.decode(files, self._preparation, self._limits.decode_seconds)
        except DecodeError as error:
            text = f"{error.name} cannot be read: {error.reason}; save or send it again"
            if error.reason.endswith(" pixels"):
                remedy = "make it smaller, or start the service with a larger --max-pixels"
                text = f"{error.name} has {error.reason}: {remedy}"
            raise RequestError(422, text) from None
        except BaseException as error:
            self._decoders.remove(decoder)
            out_of_time = decoder.kill()
            decoder = Decoder(self._limits)
            self._decoders.add(decoder)
            if not isinstance(error, BrokenProcessPool):  # the request was cancelled
                raise
            text = "the decoder crashed on this image: save it again, as a plain JPEG"
            if out_of_time:
                which = f"{files[0][0]} takes" if len(files) == 1 else f"{len(files)} images take"
                limit = f"{self._limits.decode_seconds:g} s"
                remedy = "save it again, smaller or as a plain JPEG, or send fewer images"
                text = f"{which} longer than {limit} to decode: {remedy}"
            raise RequestError(422, text) from None
        finally:
            self._idle.put_nowait(decoder)

    def close(self) -> None:
        """End the processes."""
        for decoder in self._decoders:
            decoder.kill()


# ---- The net.


class NetRequest(NamedTuple):
    """The pixels of a request's images, the number of classes to name, and whether to return the images as PNG."""

    pixels: list[bytes]
    top: int
    seen: bool


Answer = list[dict[str, Any]]


class NetRunner:
    """A classifier that predicts all waiting requests as one batch, and offers each picture to a collector."""

    def __init__(self, classifier: Classifier, collector: Collector | None = None) -> None:
        self.classifier = classifier
        self.collector: Collector | None = None
        self._thread = ThreadPoolExecutor(1)  # torch starts a pool of threads for each thread that computes
        self._turn = asyncio.Lock()
        self._waiting: deque[tuple[NetRequest, asyncio.Future[Answer]]] = deque()
        (height, width), channels, *_ = classifier.preparation
        blank = bytes(height * width * channels)
        self._thread.submit(self._predict, [NetRequest([blank], 1, False)]).result()  # the first run is slow
        self.collector = collector

    async def predict(self, request: NetRequest) -> Answer:
        """Return the JSON of a prediction for each image."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        try:
            async with self._turn:
                batch: list[tuple[NetRequest, asyncio.Future[Answer]]] = []
                while self._waiting and sum(len(one.pixels) for one, _ in batch) < MAX_BATCH_IMAGES:
                    batch.append(self._waiting.popleft())
                if batch := [pair for pair in batch if not pair[1].done()]:
                    await asyncio.shield(self._answer(batch))  # a timeout of this request must not cancel the batch
            return await answer
        finally:
            answer.cancel()  # after a timeout; no effect on a finished future

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
        """Return the JSON of each request's predictions, from one run of the net."""
        import torch

        (height, width), channels, *_ = self.classifier.preparation
        pixels = bytearray().join(data for request in batch for data in request.pixels)
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, height, width, channels)
        predictions = self.classifier.predict_batch(images.permute(0, 3, 1, 2), max(request.top for request in batch))
        results = zip(predictions, images.numpy(), strict=True)
        answers: list[Answer] = []
        for request in batch:
            answers.append([])
            for _ in request.pixels:
                prediction, image = next(results)
                if self.collector:
                    self.collector.offer(prediction.probability, prediction.unknown, image)
                top = [
                    {"label": label, "probability": round(value, 6)} for label, value in prediction.top[: request.top]
                ]
                flag = {} if prediction.unknown is None else {"unknown": prediction.unknown}
                answers[-1].append(
                    {**top[0], **flag, "top": top, **({"seen": _png_url(image)} if request.seen else {})}
                )
        return answers


def _png_url(image: Any) -> str:
    """Return a uint8 image (H, W, C) as a data: URL."""
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
