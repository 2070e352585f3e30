"""The processes of a service: one runs the net on batches of requests, some decode images; each starts again when it died.

An image that takes too long, or brings its decoder down, harms nobody else. Nothing here imports torch but the net's process: a
decoding process takes about 30 MB and a quarter of a second to start.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, resource_tracker
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from cifar_lit.data.decode import DecodeError, decode, start_worker, submit_without_main
from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.serve.bodies import Limits, RequestError
from cifar_lit.plugins import allow_imports, allowed_imports

if TYPE_CHECKING:
    from cifar_lit.inference.load import Classifier

MAX_BATCH_REQUESTS = 32
PROBE_SECONDS = 0.5  # without a request, after which the net's process is looked after
_DIED = "the net's process ended (signal 9 would mean that the machine ran out of memory)"


class Worker:
    """One process that computes one call at a time.

    Args:
        max_pixels: of an image that it decodes.
        setup: called in it first, with `args`; `ready` has its result.
    """

    def __init__(self, max_pixels: int, setup: Callable[..., Any], *args: Any) -> None:
        self._executor = ProcessPoolExecutor(1, get_context("spawn"), initializer=start_worker, initargs=(max_pixels,))
        before = {process.pid for process in active_children()}
        with _signals_blocked():
            self.ready = submit_without_main(self._executor, setup, *args)
        self._process = next(process for process in active_children() if process.pid not in before)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function; raises what it raises, and BrokenProcessPool where the process died."""
        return await asyncio.wrap_future(self._executor.submit(function, *args))

    def kill(self) -> None:
        """Ends the process; what it computes is not waited for."""
        self._process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_blocked() -> Iterator[None]:
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


class ModelInfo(NamedTuple):
    """What is served. image_size: (H, W). device: such as "cpu"."""

    net: str
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    channels: int
    device: str


# ---- Decoding.


class Decoders:
    """Two to four decoding processes, each taking one image at a time to pixels as the net takes them."""

    def __init__(self, info: ModelInfo, limits: Limits) -> None:
        self.count = max(2, min(4, os.cpu_count() or 1))
        self._info, self._limits = info, limits
        self._workers = {self._start() for _ in range(self.count)}
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        for worker in self._workers:
            worker.ready.result()
            self._idle.put_nowait(worker)

    def _start(self) -> Worker:
        return Worker(self._limits.pixels, int)  # which does nothing

    async def decode(self, name: str, data: bytes) -> bytes:
        """The pixels of an image, (H, W, C) uint8 in one row; raises RequestError, `name` saying which image."""
        worker = await self._idle.get()
        try:
            await asyncio.wrap_future(worker.ready)
            async with asyncio.timeout(self._limits.decode_seconds):
                pixels: bytes = await worker.call(_decode, data, self._info.image_size, self._info.channels)
        except DecodeError as error:
            if error.reason.endswith(" pixels"):
                text = f"{name} has {error.reason}: make it smaller, or start the service with a larger --max-pixels"
            else:
                text = f"{name} cannot be read: {error.reason}; save or send it again"
            raise RequestError(422, text) from None
        except BaseException as error:
            self._workers.discard(worker)
            worker.kill()
            worker = self._start()
            self._workers.add(worker)
            if isinstance(error, TimeoutError):
                limit = f"{self._limits.decode_seconds:g} s"
                text = f"{name} takes longer than {limit} to decode: save it again, smaller or as a plain JPEG"
                raise RequestError(422, text) from None
            if isinstance(error, BrokenProcessPool):
                raise RequestError(422, f"{name} cannot be decoded, it brought the decoder down: save it again") from None
            raise  # nobody waits for the answer any more
        finally:
            self._idle.put_nowait(worker)
        return pixels

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()


def _decode(data: bytes, size: tuple[int, int], channels: int) -> bytes:
    return decode(io.BytesIO(data), size, channels).tobytes()


# ---- The net.


class NetRequest(NamedTuple):
    """The images of a request, H·W·C bytes each; how many classes to name, and whether to show the images as they are here."""

    pixels: list[bytes]
    top: int
    seen: bool


class NetRunner:
    """The net's process, and the loop that gives it as one batch what has come in while it was at work.

    Args:
        path: a run's folder or its model.safetensors.
        accelerator: as for `resolve_device`.

    Raises:
        UsageError: there is no such accelerator.
        Failure: the net cannot be loaded.
    """

    def __init__(self, path: str, accelerator: str) -> None:
        self._setup = (0, _load_net, path, accelerator, allowed_imports())
        self._queue: asyncio.Queue[tuple[NetRequest, asyncio.Future[list[dict[str, Any]]]]] = asyncio.Queue()
        self._worker = Worker(*self._setup)
        try:
            self.info: ModelInfo = self._worker.ready.result()
        except BaseException as error:
            self.close()
            if isinstance(error, BrokenProcessPool):
                raise Failure(f"{_DIED} before it was ready") from None
            raise
        self.ready = True

    async def predict(self, request: NetRequest) -> list[dict[str, Any]]:
        """The JSON of a prediction for each image; raises RequestError where the process died."""
        answer: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((request, answer))
        return await answer

    async def run(self) -> None:
        """Answers requests; a process that died is started again. Raises what keeps it from that."""
        while True:
            batch = []
            with suppress(TimeoutError):  # a batch of none tells whether the process is there
                async with asyncio.timeout(PROBE_SECONDS):
                    batch.append(await self._queue.get())
            while len(batch) < MAX_BATCH_REQUESTS and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            answers: list[Any]
            try:
                answers = await self._worker.call(_predict, [request for request, _ in batch])
            except BrokenProcessPool:
                self.ready = False
                while not self._queue.empty():
                    batch.append(self._queue.get_nowait())
                answers = [RequestError(503, f"{_DIED}: send the request again in some seconds") for _ in batch]
            except Exception as error:
                answers = [error] * len(batch)
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if waiting.done():  # cancelled: the client was told that it takes too long
                    continue
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
            if not self.ready:
                self.close()
                self._worker = Worker(*self._setup)
                try:
                    await asyncio.wrap_future(self._worker.ready)
                except BrokenProcessPool:
                    raise Failure(f"{_DIED}, and again while it was loaded") from None
                self.ready = True

    def close(self) -> None:
        """Ends the process."""
        self._worker.kill()


_classifier: Classifier  # in the net's process


def _load_net(path: str, accelerator: str, imports: list[str]) -> ModelInfo:
    global _classifier
    import torch

    from cifar_lit.inference.load import load

    allow_imports(imports)  # of a net from the user's own file
    try:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for connections and decoding: waiting threads spin
        device = resolve_device(accelerator)
        _classifier = load(path, device)
        keep_freed_memory()
        _classifier(torch.zeros(1, *_classifier.card.input_shape, dtype=torch.uint8))  # the first run takes longer
    except (UsageError, Failure):
        raise
    except Exception as error:
        raise Failure(f"the net cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    return ModelInfo(_classifier.card.net, tuple(_classifier.classes), _classifier.size, _classifier.channels, device)


def _predict(batch: list[NetRequest]) -> list[list[dict[str, Any]]]:
    """For each request the JSON of its predictions, from one run of the net."""
    import torch

    if not batch:
        return []
    pixels = bytearray().join(data for request in batch for data in request.pixels)
    images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, *_classifier.size, _classifier.channels)
    predictions = iter(_classifier.predict_batch(images.permute(0, 3, 1, 2), max(request.top for request in batch)))
    views = iter(images.numpy())
    answers = []
    for request in batch:
        entries: list[dict[str, Any]] = []
        for _ in request.pixels:
            view = next(views)
            best = [{"label": label, "probability": round(value, 6)} for label, value in next(predictions).top[: request.top]]
            entries.append({**best[0], "top": best})
            if request.seen:
                file = io.BytesIO()
                Image.fromarray(view[:, :, 0] if view.shape[2] == 1 else view).save(file, "PNG")
                entries[-1]["seen"] = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        answers.append(entries)
    return answers
