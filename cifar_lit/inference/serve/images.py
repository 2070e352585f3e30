"""From the body of a request to pixels: what is in it, and decoding it in processes of its own.

An image that takes too long, or brings its decoder down, harms nobody else. Imports no torch: a decoding process takes about
30 MB and a quarter of a second to start.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

from cifar_lit.data.decode import DecodeError, decode, start_worker

START_SECONDS = 60.0  # for a decoding process to come up on a machine that is busy


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for."""

    body: int = 10_000_000  # bytes
    pixels: int = 25_000_000  # of one image, as its header says, before anything is decoded
    images: int = 64
    decode_seconds: float = 2.0  # for one image, after which its decoder is killed
    body_seconds: float = 10.0  # in which a request must have arrived as a whole
    answer_seconds: float = 20.0  # in which it must be answered after that
    requests: int = 128  # at a time; further ones get 503


class RequestError(Exception):
    """A request that is answered with an HTTP status of 4xx or 5xx and one line that names the remedy."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


# ---- The files in a body: raw, in a form, or as base64 in JSON.

WAYS = "send one image as the body with its type (image/jpeg), a form with files (multipart/form-data), or JSON with base64"


class Images(NamedTuple):
    """The files of a request, each with the name that errors call it by; whether it is answered as a list."""

    files: list[tuple[str, bytes]]
    many: bool


def parse_body(content_type: str, body: bytes, limits: Limits) -> Images:
    """The files in a body of this type; raises RequestError for other types, for damaged bodies, none or too many images."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind in ("application/octet-stream", ""):
        images = Images([("the image", body)], many=False)
    elif kind == "multipart/form-data":
        images = Images(_form_files(content_type, body), many=True)
    elif kind == "application/json":
        images = _json_images(body)
    elif kind == "application/x-www-form-urlencoded":  # what `curl --data-binary` says by default
        raise RequestError(
            415, f"the body is said to be {kind}: with curl, add -H 'Content-Type: image/jpeg', or use -F image=@FILE"
        )
    else:
        raise RequestError(415, f"the type {kind[:80]!r} is not taken: {WAYS}")
    if not images.files:
        raise RequestError(400, f"there is no image in the request: {WAYS}")
    if len(images.files) > limits.images:
        raise RequestError(413, f"{len(images.files)} images are too many: at most {limits.images} in one request")
    for name, data in images.files:
        _check_signature(name, data)
    return images


def _check_signature(name: str, data: bytes) -> None:
    """Refuses by its first bytes what is none of the five formats, without a decoder."""
    if not data:
        raise RequestError(400, f"{name} is empty: {WAYS}")
    known = data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF87a", b"GIF89a"))
    if not known and not (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):
        raise RequestError(415, f"{name} is not a JPEG, PNG, WebP, BMP or GIF: convert it to one of these")


def _form_files(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """The files of a form (RFC 7578); fields that are no files say nothing here and are left out."""
    header = Message()
    header["content-type"] = content_type.replace("\r", " ").replace("\n", " ")
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise RequestError(400, "the form has no boundary: leave its Content-Type to the program that makes the form")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError(400, "the form is cut short or damaged: send it again")
    files: list[tuple[str, bytes]] = []
    for part in parts[1:-1]:
        head, separator, data = part.partition(b"\r\n\r\n")
        if not separator:
            raise RequestError(400, "a part of the form has no headers: send it again")
        name = BytesHeaderParser().parsebytes(head.lstrip(b"\r\n")).get_filename()
        if name is not None:
            printable = "".join(letter if letter.isprintable() else "?" for letter in name)[:80]
            files.append((f"image {len(files) + 1} ({printable or 'without a name'})", data))
    return files


def _json_images(body: bytes) -> Images:
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, 'the body is not valid JSON: send {"image": "<base64>"} or {"images": ["<base64>", …]}') from None
    if not isinstance(content, dict) or len(content.keys() & {"image", "images"}) != 1:
        raise RequestError(
            422, 'the JSON must hold either "image" or "images": {"image": "<base64>"} or {"images": ["<base64>", …]}'
        )
    if "image" in content:
        return Images([("the image", _from_base64("the image", content["image"]))], many=False)
    if not isinstance(content["images"], list):
        raise RequestError(422, '"images" must be a list of base64 texts; for one image, send {"image": "<base64>"}')
    named = ((f"image {number}", text) for number, text in enumerate(content["images"], 1))
    return Images([(name, _from_base64(name, text)) for name, text in named], many=True)


def _from_base64(name: str, text: object) -> bytes:
    """The bytes of a base64 text, which may be a data: URL and may be folded into lines."""
    if not isinstance(text, str):
        raise RequestError(422, f"{name} must be a base64 text, not {type(text).__name__}")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(422, f"{name} is not valid base64: encode the file's bytes, all of them") from None


# ---- Decoding processes.


@contextmanager
def signals_blocked() -> Iterator[None]:
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


def decode_loop(pipe: Connection, size: tuple[int, int], channels: int, max_pixels: int) -> None:
    """What a decoding process does: a file's bytes in; True and its pixels, or False and the reason, out."""
    start_worker(max_pixels)
    pipe.send((True, b""))  # it is up
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


class _Decoder:
    """One decoding process and our end of its pipe."""

    def __init__(self, settings: tuple[tuple[int, int], int, int]) -> None:
        context = get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=decode_loop, args=(child_pipe, *settings), name="decoder", daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a spawned process would run the main script again
        try:
            with signals_blocked():
                self.process.start()
        finally:
            sys.modules["__main__"] = main
        child_pipe.close()

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


class DecoderPool:
    """`count` decoding processes, each taking one image at a time, to pixels of `size` (H, W) and 3 or 1 channels."""

    def __init__(self, count: int, size: tuple[int, int], channels: int, limits: Limits) -> None:
        self.count, self.limits = count, limits
        self._settings = (size, channels, limits.pixels)
        self._idle: queue.SimpleQueue[_Decoder | None] = queue.SimpleQueue()
        self._all: set[_Decoder] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(count, "decoder")
        for decoder in [self._start() for _ in range(count)]:
            if decoder is not None and decoder.wait():
                self._idle.put(decoder)
        if self._idle.empty():
            self.close()
            raise RuntimeError("no process for decoding images could be started")

    def _start(self) -> _Decoder | None:
        with self._lock:
            if self._closed:
                return None
            decoder = _Decoder(self._settings)
            self._all.add(decoder)
            return decoder

    async def decode(self, name: str, data: bytes) -> bytes:
        """The pixels of an image, (H, W, C) uint8 in one row; raises RequestError, `name` saying which image."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, name, data)

    def _decode(self, name: str, data: bytes) -> bytes:
        decoder = self._idle.get()
        if decoder is None:
            raise RequestError(503, "the service is stopping: send the image again later")
        try:
            decoder.pipe.send_bytes(data)
            if not decoder.pipe.poll(self.limits.decode_seconds):
                self._replace(decoder)
                limit = f"{self.limits.decode_seconds:g} s"
                raise RequestError(422, f"{name} takes longer than {limit} to decode: save it again, smaller or as a plain JPEG")
            decoded, answer = decoder.pipe.recv()
        except (EOFError, OSError):
            self._replace(decoder)
            raise RequestError(422, f"{name} cannot be decoded, it brought the decoder down: save it again") from None
        self._idle.put(decoder)
        if decoded:
            return bytes(answer)
        if answer.endswith(" pixels"):
            raise RequestError(422, f"{name} has {answer}: make it smaller, or start the service with a larger --max-pixels")
        raise RequestError(422, f"{name} cannot be read: {answer}; save or send it again")

    def _replace(self, decoder: _Decoder) -> None:
        """Kills a process and starts another without waiting for it."""
        decoder.kill()
        with self._lock:
            self._all.discard(decoder)

        def start() -> None:
            replacement = self._start()
            if replacement is not None and replacement.wait():
                self._idle.put(replacement)

        threading.Thread(target=start, daemon=True).start()

    def close(self) -> None:
        """Ends the processes; what is being decoded is not waited for."""
        with self._lock:
            self._closed = True
            for decoder in self._all:
                decoder.process.kill()
                decoder.process.join()
        for _ in range(self.count):  # for threads that wait for a process
            self._idle.put(None)
        self._threads.shutdown(wait=False, cancel_futures=True)
