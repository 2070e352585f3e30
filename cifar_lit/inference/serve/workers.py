"""What computes for a service: processes that decode images, each of which can be ended, and the net on a thread of its own.

An image that takes too long, or brings its decoder down, harms nobody else. Decoding processes import no torch: one takes about
30 MB and a quarter of a second to start.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from cifar_lit.data.decode import DecodeError, decode, start_worker, submit_without_main
from cifar_lit.inference.serve.bodies import Limits, RequestError

if TYPE_CHECKING:
    from cifar_lit.inference.load import Classifier

MAX_BATCH_REQUESTS = 32

# ---- Decoding.


class Decoder:
    """A process that decodes one image at a time."""

    def __init__(self, max_pixels: int) -> None:
        self._executor = ProcessPoolExecutor(1, get_context("spawn"), initializer=start_worker, initargs=(max_pixels,))
        before = {process.pid for process in active_children()}
        with _signals_blocked():
            self.ready = submit_without_main(self._executor, int)  # which does nothing
        self._process = next(process for process in active_children() if process.pid not in before)

    async def decode(self, data: bytes, size: tuple[int, int], channels: int) -> bytes:
        """(H, W, C) uint8 in one row; raises DecodeError, and BrokenProcessPool where the process died."""
        return await asyncio.wrap_future(self._executor.submit(_decode, data, size, channels))

    def kill(self) -> None:
        """Ends the process; what it computes is not waited for."""
        self._process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _decode(data: bytes, size: tuple[int, int], channels: int) -> bytes:
    return decode(io.BytesIO(data), size, channels).tobytes()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """For starting processes: Ctrl-C and SIGTERM, which reach all at once, are left to this one, which answers what runs."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # started in here, it would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Decoders:
    """Two to four decoding processes; one that died or was ended is started again."""

    def __init__(self, size: tuple[int, int], channels: int, limits: Limits) -> None:
        self.count = max(2, min(4, os.cpu_count() or 1))
        self._size, self._channels, self._limits = size, channels, limits
        self._decoders = {Decoder(limits.pixels) for _ in range(self.count)}
        self._idle: asyncio.Queue[Decoder] = asyncio.Queue()
        for decoder in self._decoders:
            decoder.ready.result()
            self._idle.put_nowait(decoder)

    async def decode(self, name: str, data: bytes) -> bytes:
        """The pixels of an image, (H, W, C) uint8 in one row; raises RequestError, `name` saying which image."""
        decoder = await self._idle.get()
        try:
            await asyncio.wrap_future(decoder.ready)
            async with asyncio.timeout(self._limits.decode_seconds):
                return await decoder.decode(data, self._size, self._channels)
        except DecodeError as error:
            if error.reason.endswith(" pixels"):
                text = f"{name} has {error.reason}: make it smaller, or start the service with a larger --max-pixels"
            else:
                text = f"{name} cannot be read: {error.reason}; save or send it again"
            raise RequestError(422, text) from None
        except BaseException as error:
            self._decoders.remove(decoder)
            decoder.kill()
            decoder = Decoder(self._limits.pixels)
            self._decoders.add(decoder)
            if isinstance(error, TimeoutError):
                limit = f"{self._limits.decode_seconds:g} s"
                text = f"{name} takes longer than {limit} to decode: save it again, smaller or as a plain JPEG"
                raise RequestError(422, text) from None
            if isinstance(error, BrokenProcessPool):
                raise RequestError(422, f"{name} cannot be decoded, it brought the decoder down: save it again") from None
            raise  # nobody waits for the answer any more
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
        self._waiting: list[tuple[NetRequest, asyncio.Future[Answer]]] = []
        blank = bytes(classifier.size[0] * classifier.size[1] * classifier.channels)
        self._thread.submit(self._predict, [NetRequest([blank], 1, False)]).result()  # the first run takes longer

    async def predict(self, request: NetRequest) -> Answer:
        """The JSON of a prediction for each image."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        async with self._turn:
            if self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH_REQUESTS], self._waiting[MAX_BATCH_REQUESTS:]
                await asyncio.shield(self._answer(batch))  # others wait for it too
        return await answer

    async def _answer(self, batch: list[tuple[NetRequest, asyncio.Future[Answer]]]) -> None:
        requests = [request for request, _ in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._predict, requests)
        except Exception as error:
            for _, waiting in batch:
                if not waiting.done():  # cancelled: the client was told that it takes too long
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
                best = [{"label": label, "probability": round(value, 6)} for label, value in prediction.top[: request.top]]
                entry = {**best[0], "top": best}
                if request.seen:
                    file = io.BytesIO()
                    Image.fromarray(view[:, :, 0] if view.shape[2] == 1 else view).save(file, "PNG")
                    entry["seen"] = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
                answers[-1].append(entry)
        return answers
