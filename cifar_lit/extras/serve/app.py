"""The service over HTTP: predictions, and the limits and classes for its page."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cifar_lit import __version__
from cifar_lit.data.photos.decode import DecodeError, decode
from cifar_lit.inference.load import Classifier
from cifar_lit.inference.rejection import caveat
from cifar_lit.runs.figures import data_uri

PAGE = Path(__file__).parent / "page"
IMAGES = 64  # in a request, at most

Files = Sequence[tuple[str, bytes]]  # name in errors, and content


class Service:
    """What the page and programs ask for.

    max_bytes: largest body of a request.
    """

    def __init__(self, classifier: Classifier, max_bytes: int) -> None:
        self.classifier, self.max_bytes = classifier, max_bytes
        self._thread = ThreadPoolExecutor(1)  # torch starts a pool of threads for each thread that computes
        self.routes = [Route("/health", self._health), Route("/predict", self._predict, methods=["POST"])]

    async def _health(self, request: Request) -> Response:
        return JSONResponse({
            "status": "ok",
            "version": __version__,
            "net": self.classifier.card.net,
            "classes": self.classifier.classes,
            "image_size": self.classifier.preparation.size,
            "reject": self.classifier.reject,
            "caveat": caveat(self.classifier.reject),
            "coverage": self.classifier.coverage,
            "max_bytes": self.max_bytes,
            "max_images": IMAGES,
        })  # fmt: skip

    async def _predict(self, request: Request) -> Response:
        if int(request.headers["content-length"]) > self.max_bytes:  # a body has to declare its length
            raise HTTPException(413, f"the body is larger than {self.max_bytes / 1e6:g} MB")
        top = request.query_params.get("top", "3")
        if not top.isdecimal() or int(top) < 1:
            raise HTTPException(422, f"top must be a whole number from 1 on, not {top!r}")
        is_form = request.headers.get("content-type", "").startswith("multipart/form-data")
        files: Files = [("the image", await request.body())]
        if is_form:
            files = await _files(request)
        seen = "seen" in request.query_params
        loop = asyncio.get_running_loop()
        predictions = await loop.run_in_executor(self._thread, self.predict, files, int(top), seen)
        if is_form:
            return JSONResponse({"predictions": predictions})
        return JSONResponse(predictions[0])

    def predict(self, files: Files, top: int, seen: bool) -> list[dict[str, object]]:
        """Return the JSON of a prediction for each image file. Raise HTTPException for an unreadable one.

        seen: whether to return the images as the net sees them.
        """
        pixels = []
        for name, data in files:
            try:
                pixels.append(decode(io.BytesIO(data), self.classifier.preparation))
            except DecodeError as error:
                raise HTTPException(422, f"{name} cannot be read: {error.reason}") from None
        images = torch.from_numpy(np.stack(pixels))
        predictions: list[dict[str, object]] = []
        for image, result in zip(images, self.classifier.predict_batch(images.permute(0, 3, 1, 2), top), strict=True):
            classes = [{"label": label, "probability": round(value, 6)} for label, value in result.top]
            prediction: dict[str, object] = {**classes[0], "label": result.label, "top": classes}
            if result.unknown is not None:
                prediction["unknown"] = result.unknown
            if result.prediction_set is not None:
                prediction["prediction_set"] = result.prediction_set
            if seen:
                prediction["seen"] = data_uri(image, 2 * max(image.shape))  # a PNG
            predictions.append(prediction)
        return predictions


async def _files(request: Request) -> Files:
    """Return the files of a form. Other fields are ignored."""
    files = []
    async with request.form(max_files=IMAGES) as form:
        for _, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.append((str(value.filename), await value.read()))
    if not files:
        raise HTTPException(400, "there is no file in the form")
    return files
