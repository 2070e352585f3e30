"""From the body of a request to pixels: parse one image or a form, and decode in processes that can be killed."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

from starlette.exceptions import HTTPException

from cifar_lit.data.decode import KINDS, SIGNATURE, DecodeError, Preparation, decode, start_worker, submit_without_main
from cifar_lit.signals import STOP_SIGNALS, signals_blocked, start_resource_tracker
from cifar_lit.text import printable
from cifar_lit.threads import free_cores


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    body: int = 10_000_000  # bytes
    pixels: int = 25_000_000  # larger images, by their headers, are not decoded
    images: int = 64
    # CPU time to decode all images. A slower decoder is killed, and a new decoder starts in 0.3 s.
    decode_seconds: float = 0.5


MAX_FIELDS = 64  # in a form, besides its images
MAX_PART_HEADER_BYTES = 2048
BOUNDARY = re.compile(r';\s*boundary="?([^";\s]+)', re.IGNORECASE)
FILE_NAME = re.compile(rb'^content-disposition:.*;\s*filename\*?="?([^";\r\n]*)', re.IGNORECASE | re.MULTILINE)
WAYS = "send an image as the body with its Content-Type (image/jpeg), or a form with files (multipart/form-data)"

Files = list[tuple[str, bytes]]  # name in errors, and content


class Images(NamedTuple):
    """The images of a request, and whether the answer is a list."""

    files: Files
    many: bool


def parse_body(content_type: str, body: bytes, limits: Limits) -> Images:
    """Return the images in a body.

    Raise HTTPException if the type is unsupported, or the body is damaged or has no images or too many.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind in ("application/octet-stream", ""):
        images = Images([("the image", body)], many=False)
    elif kind == "multipart/form-data":
        images = Images(_form_files(content_type, body, limits), many=True)
    else:  # `curl --data-binary` sends application/x-www-form-urlencoded by default
        raise HTTPException(415, f"the type {kind[:80]!r} is not supported: {WAYS}; with curl, use -F image=@FILE")
    if not images.files:
        raise HTTPException(400, f"there is no image in the request: {WAYS}")
    if len(images.files) > limits.images:
        raise HTTPException(413, f"there are too many images: send at most {limits.images} in one request")
    for name, data in images.files:
        if not SIGNATURE.match(data):
            if not data:
                raise HTTPException(415, f"{name} is empty: {WAYS}")
            raise HTTPException(415, f"{name} is not a {KINDS}: convert it to one of these")
    return images


def _form_files(content_type: str, body: bytes, limits: Limits) -> Files:
    """Return the files of a form (RFC 7578). Other fields are ignored."""
    boundary = BOUNDARY.search(content_type)
    if not boundary:
        raise HTTPException(400, "the form has no boundary: send it again")
    delimiter = b"\r\n--" + boundary[1].encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(delimiter, limits.images + MAX_FIELDS)
    if delimiter in parts[-1]:
        raise HTTPException(413, f"the form has too many parts: send at most {limits.images} images in one request")
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise HTTPException(400, "the form is cut short or damaged: send it again")
    files: Files = []
    for part in parts[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        if len(head) > MAX_PART_HEADER_BYTES:
            raise HTTPException(413, f"a part of the form has more than {MAX_PART_HEADER_BYTES} bytes of headers")
        if match := FILE_NAME.search(head.replace(b"\r\n ", b" ")):
            name = printable(match[1].decode("utf-8", "replace"))[:80] or "without a name"
            files.append((f"image {len(files) + 1} ({name})", data))
    return files


class Decoders:
    """Two to four processes, which do not import torch: 30 MB and a quarter of a second each.

    An image that takes too long, or crashes its decoder, affects no other request.
    """

    def __init__(self, preparation: Preparation, limits: Limits) -> None:
        self._preparation, self._limits = preparation, limits
        self._idle: asyncio.Queue[ProcessPoolExecutor] = asyncio.Queue()
        for _ in range(max(2, min(4, free_cores()))):
            self._idle.put_nowait(self._start())

    def _start(self) -> ProcessPoolExecutor:
        start_resource_tracker()  # the executor would start it, which unblocks signals
        with signals_blocked(STOP_SIGNALS):  # all processes receive them, but only this one handles them
            spawn, arguments = get_context("spawn"), (self._limits.pixels,)
            executor = ProcessPoolExecutor(1, spawn, initializer=start_worker, initargs=arguments)
            submit_without_main(executor, int)  # starts the process
        return executor

    async def decode(self, files: Files) -> list[bytes]:
        """Return the pixels of each image, uint8 (H, W, C). Raise HTTPException for an image that cannot be decoded."""
        decoder = await self._idle.get()
        try:
            job = decoder.submit(_decode, files, self._preparation, self._limits.decode_seconds)
            return await asyncio.wrap_future(job)
        except DecodeError as error:
            text = f"{error.name} cannot be read: {error.reason}; save or send it again"
            if error.reason.endswith(" pixels"):
                remedy = "make it smaller, or start the service with a larger --max-pixels"
                text = f"{error.name} has {error.reason}: {remedy}"
            raise HTTPException(422, text) from None
        except BrokenProcessPool:
            decoder.shutdown(wait=False)
            decoder = self._start()
            what = f"one of {len(files)} images"
            if len(files) == 1:
                what, _ = files[0]
            fault = f"{what} crashed the decoder, or took longer than {self._limits.decode_seconds:g} s"
            remedy = "save it smaller or as a JPEG, send fewer images, or serve with a larger --decode-seconds"
            raise HTTPException(422, f"{fault}: {remedy}") from None
        finally:
            self._idle.put_nowait(decoder)


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
    if sys.platform != "win32" and hasattr(signal, "setitimer"):  # Windows limits only the whole answer
        signal.setitimer(signal.ITIMER_PROF, seconds)
