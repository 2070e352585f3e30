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
from litserve.loops.simple_loops import BatchedLoop
from starlette.responses import JSONResponse

from cifar_lit.errors import Failure, UsageError, first_line
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.plugins import allow_imports, allowed_imports

MAX_REQUESTS = 32  # in one batch

logging.getLogger("litserve").setLevel(logging.CRITICAL)  # it would tell of every start and stop; our own lines say what matters


@dataclass(frozen=True)
class ModelInfo:
    """What the HTTP process must know about the net. size: (H, W). device: such as "cpu"."""

    net: str
    classes: tuple[str, ...]
    size: tuple[int, int]
    channels: int
    device: str


async def read_request(request: Request) -> dict[str, Any]:
    """A request's images as the net takes them; see `http.RequestReader`."""
    payload: dict[str, Any] = await request.app.state.reader(request)
    return payload


class GreedyLoop(BatchedLoop):
    """Batches of all requests that have come in while the net was at work; sleeps when there are none.

    LitServe's own loop asks for requests a thousand times a second, and waits for further ones even if there is a single client.
    """

    def get_batch_requests(self, lit_api: ls.LitAPI, request_queue: Any, transport: Any) -> tuple[list[Any], list[Any]]:
        """(response queue, id, payload) of each request, and no timed out ones: the HTTP process sees to these."""
        try:
            requests = [request_queue.get(timeout=1.0)]
        except queue.Empty:
            return [], []
        with suppress(queue.Empty):
            while len(requests) < lit_api.max_batch_size:
                requests.append(request_queue.get_nowait())
        return [(consumer, uid, payload) for consumer, uid, _, payload in requests], []


class NetAPI(ls.LitAPI):
    """A run's net under LitServe.

    Args:
        path: the run's folder or its model.safetensors.
        accelerator: as for `resolve_device`.
        pipe: where the process sends a `ModelInfo`, or the error that kept it from coming up.
    """

    def __init__(self, path: str, accelerator: str, pipe: Connection) -> None:
        super().__init__(max_batch_size=MAX_REQUESTS, loop=GreedyLoop())
        self.path, self.accelerator, self.pipe = path, accelerator, pipe
        self.siblings: list[int] = []
        self.imports: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        """For the net's process: with the processes that were started before it, which is LitServe's for its queues."""
        return {**self.__dict__, "siblings": [process.pid for process in active_children()], "imports": allowed_imports()}

    def setup(self, device: str) -> None:
        """Loads the net, runs it once, and says so; runs in the net's process."""
        _end_with_parent(self.siblings)
        allow_imports(self.imports)  # of the user's own nets
        try:
            info = self._load()
        except (UsageError, Failure) as error:
            self.pipe.send(error)
            raise
        except BaseException as error:
            self.pipe.send(Failure(f"the net cannot be loaded: {type(error).__name__}: {first_line(error)}"))
            raise
        self.pipe.send(info)
        logging.getLogger("litserve").setLevel(logging.ERROR)  # from now on an error is a fault of ours

    def _load(self) -> ModelInfo:
        import torch

        from cifar_lit.inference.load import load

        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # a core for connections and decoding: threads that wait spin
        device = resolve_device(self.accelerator)
        self.classifier = load(self.path, device)
        keep_freed_memory()
        self.classifier(torch.zeros(1, *self.classifier.card.input_shape, dtype=torch.uint8))  # not in a request
        return ModelInfo(
            self.classifier.card.net, tuple(self.classifier.classes), self.classifier.size, self.classifier.channels, device
        )

    def decode_request(self, request: Annotated[dict[str, Any], Depends(read_request)]) -> dict[str, Any]:
        """Nothing is left to do: `read_request` has decoded the images."""
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The requests of a batch as they are."""
        return inputs

    def predict(self, x: list[dict[str, Any]]) -> list[JSONResponse]:
        """The answers to a batch of requests, from one run of the net."""
        import torch

        pixels = bytearray().join(data for request in x for data in request["pixels"])
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, *self.classifier.size, self.classifier.channels)
        predictions = self.classifier.predict_batch(images.permute(0, 3, 1, 2), max(request["top"] for request in x))
        answers, start = [], 0
        for request in x:
            end = start + len(request["pixels"])
            entries = [_entry(prediction, request["top"]) for prediction in predictions[start:end]]
            if request["seen"]:
                for entry, image in zip(entries, images[start:end].numpy(), strict=True):
                    entry["seen"] = _data_url(image)
            answers.append(JSONResponse({"predictions": entries} if request["many"] else entries[0]))
            start = end
        return answers

    def unbatch(self, output: list[JSONResponse]) -> list[JSONResponse]:
        """The answers of a batch as they are."""
        return output


def _entry(prediction: Any, top: int) -> dict[str, Any]:
    """The JSON of one prediction."""
    best = [{"label": label, "probability": round(value, 6)} for label, value in prediction.top[:top]]
    return {**best[0], "top": best}


def _data_url(pixels: Any) -> str:
    """An image, uint8 (H, W, C), as a PNG for a page."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _end_with_parent(siblings: list[int]) -> None:
    """Ends this process and its siblings when the parent is gone; a killed one could not do it, and they would keep its port."""
    parent = parent_process()
    if parent is not None:

        def wait_for_parent() -> None:
            parent.join()
            for process in siblings:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=wait_for_parent, daemon=True).start()
