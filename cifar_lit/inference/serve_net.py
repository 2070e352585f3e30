"""The net's process: LitServe's interface to it, and the loop that takes what has come in as one batch.

Torch is imported in that process alone. Annotations are values here, not texts, as LitServe and FastAPI read one of them.
"""

import base64
import io
import logging
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, parent_process
from multiprocessing.connection import Connection
from typing import Annotated, Any

import litserve as ls
from fastapi import Depends, Request
from litserve.loops.base import LitLoop
from litserve.loops.simple_loops import BatchedLoop
from starlette.responses import JSONResponse

from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import keep_freed_memory, resolve_device

MAX_REQUESTS = 32  # in one batch

logging.getLogger("litserve").setLevel(logging.CRITICAL)  # it would tell of every start and stop; our own lines say what matters


@dataclass(frozen=True)
class Facts:
    """What the HTTP process must know about the net. size: (H, W). device: such as "cpu"."""

    net: str
    classes: tuple[str, ...]
    size: tuple[int, int]
    channels: int
    device: str


async def read_request(request: Request) -> dict[str, Any]:
    """A request's images as the net takes them; see `serve_app`."""
    payload: dict[str, Any] = await request.app.state.reader(request)
    return payload


class GreedyLoop(BatchedLoop):
    """Batches of all requests that have come in while the net was at work; sleeps when there are none.

    LitServe's own loop asks for requests a thousand times a second, and waits for further ones even if there is a single client.
    """

    def get_batch_requests(self, lit_api: ls.LitAPI, request_queue: Any, transport: Any) -> tuple[list[Any], list[Any]]:
        """(response queue, id, payload) of each request, and no timed out ones: the HTTP process sees to these."""
        try:
            found = [request_queue.get(timeout=1.0)]
        except queue.Empty:
            return [], []
        with suppress(queue.Empty):
            while len(found) < lit_api.max_batch_size:
                found.append(request_queue.get_nowait())
        return [(consumer, uid, payload) for consumer, uid, _, payload in found], []


class NetAPI(ls.LitAPI):
    """A run's net under LitServe.

    path: the run's folder or its model.safetensors. accelerator: as for `resolve_device`. told: where the process says
    `Facts`, or the error that kept it from coming up.
    """

    def __init__(self, path: str, accelerator: str, told: Connection) -> None:
        loop: LitLoop = GreedyLoop()
        super().__init__(max_batch_size=MAX_REQUESTS, loop=loop)
        self.path, self.accelerator, self.told = path, accelerator, told
        self.siblings: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        """For the net's process: with the processes that were started before it, which is LitServe's for its queues."""
        return {**self.__dict__, "siblings": [process.pid for process in active_children()]}

    def setup(self, device: str) -> None:
        """Loads the net, runs it once, and says so; runs in the net's process."""
        _follow_parent(self.siblings)
        try:
            facts = self._loaded()
        except (UsageError, Failure) as error:
            self.told.send(error)
            raise
        except BaseException as error:
            self.told.send(Failure(f"the net cannot be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}"))
            raise
        self.told.send(facts)
        logging.getLogger("litserve").setLevel(logging.ERROR)  # from now on an error is a fault of ours

    def _loaded(self) -> Facts:
        import torch

        from cifar_lit.inference.load import load

        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for connections and decoding: threads that wait spin
        chosen = resolve_device(self.accelerator)
        self.classifier = load(self.path, chosen)
        keep_freed_memory()
        self.classifier(torch.zeros(1, self.classifier.channels, *self.classifier.size, dtype=torch.uint8))  # not in a request
        card = self.classifier.card
        return Facts(card.net, tuple(self.classifier.classes), self.classifier.size, self.classifier.channels, chosen)

    def decode_request(self, request: Annotated[dict[str, Any], Depends(read_request)]) -> dict[str, Any]:
        """Nothing is left to do: `read_request` has decoded the images."""
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The requests of a batch as they are."""
        return inputs

    def predict(self, x: list[dict[str, Any]]) -> list[JSONResponse]:
        """The answers to a batch of requests, from one run of the net."""
        import torch

        height, width = self.classifier.size
        pixels = b"".join(data for request in x for data in request["pixels"])
        images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, height, width, self.classifier.channels)
        found = self.classifier.predictions(images.permute(0, 3, 1, 2), max(request["top"] for request in x))
        answers, start = [], 0
        for request in x:
            end = start + len(request["pixels"])
            shown = images[start:end].numpy() if request["seen"] else [None] * (end - start)
            entries = [_entry(one, request["top"], seen) for one, seen in zip(found[start:end], shown, strict=True)]
            answers.append(JSONResponse({"predictions": entries} if request["many"] else entries[0]))
            start = end
        return answers

    def unbatch(self, output: list[JSONResponse]) -> list[JSONResponse]:
        """The answers of a batch as they are."""
        return output


def _entry(prediction: Any, top: int, seen: Any) -> dict[str, Any]:
    """The JSON of one prediction; `seen`, if given, are the pixels (H, W, C) to go with it as a picture."""
    best = [{"label": label, "probability": round(value, 6)} for label, value in prediction.top[:top]]
    entry = {**best[0], "top": best}
    return entry if seen is None else {**entry, "seen": _picture(seen)}


def _picture(pixels: Any) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _follow_parent(siblings: list[int]) -> None:
    """Ends this process and its siblings when the parent is gone; a killed one could not do it, and they would keep its port."""
    parent = parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            for process in siblings:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
