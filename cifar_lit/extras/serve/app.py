"""The service over HTTP: the page, its health and predictions."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cifar_lit import __version__
from cifar_lit.extras.serve.images import Decoders, Limits, parse_body
from cifar_lit.extras.web import read_body
from cifar_lit.inference.load import Classifier

PAGE = Path(__file__).parent / "page"
DEFAULT_TOP = 3
ANSWER_SECONDS = 20  # once a request has arrived completely


class Service:
    """What the page and programs ask for."""

    def __init__(self, classifier: Classifier, limits: Limits) -> None:
        self.classifier, self.limits = classifier, limits
        self._thread = ThreadPoolExecutor(1)  # torch starts a pool of threads for each thread that computes
        (height, width), channels, *_ = classifier.preparation
        self._thread.submit(self.predict, [bytes(height * width * channels)], 1, False).result()  # the first is slow
        self._decoders = Decoders(classifier.preparation, limits)
        self.routes = [
            Route("/health", self._answer_health),
            Route("/predict", self._answer_images, methods=["POST"]),
        ]

    async def _answer_health(self, request: Request) -> Response:
        health = {
            "status": "ok",
            "version": __version__,
            "net": self.classifier.card.net,
            "classes": self.classifier.classes,
            "image_size": self.classifier.preparation.size,
            "limits": asdict(self.limits),
        }
        return JSONResponse(health)

    async def _answer_images(self, request: Request) -> Response:
        top = self._top(request.query_params.get("top"))
        seen = request.query_params.get("seen") in ("1", "true")
        body = await read_body(request, self.limits.body, "send less, or start the service with a larger --max-mb")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                kind = request.headers.get("content-type", "")
                images = await asyncio.to_thread(parse_body, kind, body, self.limits)
                pixels = await self._decoders.decode(images.files)
                work = partial(self.predict, pixels, top, seen)
                predictions = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            text = f"there was no answer within {ANSWER_SECONDS} s: the service is busy, try again later"
            raise HTTPException(503, text) from None
        if images.many:
            return JSONResponse({"predictions": predictions})
        return JSONResponse(predictions[0])

    def _top(self, text: str | None) -> int:
        count = len(self.classifier.classes)
        if text is None:
            return min(DEFAULT_TOP, count)
        if not re.fullmatch("[1-9][0-9]{0,5}", text):
            raise HTTPException(422, f"top must be a whole number from 1 to {count}, not {text[:20]!r}")
        return min(int(text), count)

    def predict(self, pixels: list[bytes], top: int, seen: bool) -> list[dict[str, object]]:
        """Return the JSON of a prediction for each image.

        pixels: decoded images, uint8 (H, W, C). seen: whether to return the images as PNG.
        """
        (height, width), channels, *_ = self.classifier.preparation
        images = torch.frombuffer(bytearray().join(pixels), dtype=torch.uint8).view(-1, height, width, channels)
        predictions: list[dict[str, object]] = []
        results = self.classifier.predict_batch(images.permute(0, 3, 1, 2), top)
        for result, image in zip(results, images.numpy(), strict=True):
            classes = [{"label": label, "probability": round(value, 6)} for label, value in result.top]
            prediction: dict[str, object] = {**classes[0], "top": classes}
            if result.unknown is not None:
                prediction["unknown"] = result.unknown
            if result.prediction_set is not None:
                prediction["prediction_set"] = result.prediction_set
            if seen:
                prediction["seen"] = "data:image/png;base64," + base64.b64encode(as_png(image)).decode()
            predictions.append(prediction)
        return predictions


def as_png(image: np.ndarray) -> bytes:
    """Return an image, uint8 (H, W, C) with C = 1 or 3, as PNG."""
    file = io.BytesIO()
    Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()
