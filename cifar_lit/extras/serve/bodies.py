"""The images in the body of a request: raw, in a form, or as base64 in JSON."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from cifar_lit.data.decode import KINDS, SIGNATURE


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Args:
        body: bytes.
        pixels: pixels of an image, as its header says. Larger images are not decoded.
        images: number of images.
        decode_seconds: CPU time to decode all images. A slower decoder is killed, and a new decoder starts in 0.3 s.
        body_seconds: total time for which a client may pause. A slow transfer counts as a pause.
        answer_seconds: time to answer a request once it has arrived completely.
        requests: number of concurrent requests; further requests get status 503.
    """

    body: int = 10_000_000
    pixels: int = 25_000_000
    images: int = 64
    decode_seconds: float = 0.5
    body_seconds: float = 10.0
    answer_seconds: float = 20.0
    requests: int = 64


class RequestError(Exception):
    """A request to answer with an HTTP status of 4xx or 5xx, and one line that names the remedy."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


MAX_FIELDS = 64  # in a form or a JSON object, besides its images
MAX_PART_HEADER_BYTES = 2048
BOUNDARY = re.compile(r';\s*boundary="?([^";\s]+)', re.IGNORECASE)
FILE_NAME = re.compile(rb'^content-disposition:.*;\s*filename\*?="?([^";\r\n]*)', re.IGNORECASE | re.MULTILINE)
WAYS = (
    "send an image as the body with its Content-Type (image/jpeg), a form with files (multipart/form-data), "
    "or base64 in JSON (application/json)"
)
JSON_EXAMPLE = '{"image": "<base64>"} or {"images": ["<base64>", …]}'


class Images(NamedTuple):
    """The images of a request as (name in errors, file) pairs, and whether the answer is a list."""

    files: list[tuple[str, bytes]]
    many: bool


def parse_body(content_type: str, body: bytes, limits: Limits) -> Images:
    """Return the images in a body.

    Raises:
        RequestError: the type is unsupported, the body is damaged, or it has no images or too many.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind in ("application/octet-stream", ""):
        images = Images([("the image", body)], many=False)
    elif kind == "multipart/form-data":
        images = Images(_form_files(content_type, body, limits), many=True)
    elif kind == "application/json":
        images = _json_images(body, limits)
    else:  # `curl --data-binary` sends application/x-www-form-urlencoded by default
        raise RequestError(415, f"the type {kind[:80]!r} is not supported: {WAYS}; with curl, use -F image=@FILE")
    if not images.files:
        raise RequestError(400, f"there is no image in the request: {WAYS}")
    if len(images.files) > limits.images:
        raise RequestError(413, f"{len(images.files)} images are too many: send at most {limits.images} in one request")
    for name, data in images.files:
        if not data:
            raise RequestError(400, f"{name} is empty: {WAYS}")
        if not SIGNATURE.match(data):
            raise RequestError(415, f"{name} is not a {KINDS}: convert it to one of these")
    return images


def _form_files(content_type: str, body: bytes, limits: Limits) -> list[tuple[str, bytes]]:
    """Return the files of a form (RFC 7578). Other fields are ignored."""
    boundary = BOUNDARY.search(content_type)
    delimiter = b"\r\n--" + boundary[1].encode("latin-1", "replace") if boundary else b"\r\n"
    # Split up to twice the limit, so that the error message about slightly too many images has their number.
    parts = (b"\r\n" + body).split(delimiter, 2 * limits.images + MAX_FIELDS)
    if boundary and delimiter in parts[-1]:
        raise RequestError(413, f"the form has too many parts: send at most {limits.images} images in one request")
    if not boundary or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError(400, "the form has no boundary, is cut short or damaged: send it again")
    files: list[tuple[str, bytes]] = []
    for part in parts[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        if len(head) > MAX_PART_HEADER_BYTES:
            text = f"a part of the form has more than {MAX_PART_HEADER_BYTES} bytes of headers: use a shorter file name"
            raise RequestError(413, text)
        if match := FILE_NAME.search(head.replace(b"\r\n ", b" ")):
            letters = (letter if letter.isprintable() else "?" for letter in match[1].decode("utf-8", "replace"))
            files.append((f"image {len(files) + 1} ({''.join(letters)[:80] or 'without a name'})", data))
    return files


def _json_images(body: bytes, limits: Limits) -> Images:
    # Parsed objects take 25 times the memory of their text, so limit their number first.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > 3 * limits.images + MAX_FIELDS:
        text = f"the body is not valid JSON, or holds more than {limits.images} images: send {JSON_EXAMPLE}"
        raise RequestError(400, text)
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, f"the body is not valid JSON: send {JSON_EXAMPLE}") from None
    if not isinstance(content, dict) or len(content.keys() & {"image", "images"}) != 1:
        raise RequestError(422, f'the JSON must hold either "image" or "images": {JSON_EXAMPLE}')
    if "image" in content:
        return Images([("the image", _from_base64("the image", content["image"]))], many=False)
    if not isinstance(content["images"], list):
        raise RequestError(422, f'"images" must be a list: {JSON_EXAMPLE}')
    named = ((f"image {number}", text) for number, text in enumerate(content["images"], 1))
    return Images([(name, _from_base64(name, text)) for name, text in named], many=True)


def _from_base64(name: str, text: object) -> bytes:
    """Return the bytes of a base64 text, which may be a data: URL or folded into lines."""
    try:
        if not isinstance(text, str):
            raise ValueError(text)
        base64_text = text.partition(",")[2] if text.startswith("data:") else text
        return base64.b64decode(base64_text.encode().translate(None, b" \t\r\n"), validate=True)
    except ValueError:
        raise RequestError(422, f"{name} is not valid base64: encode all bytes of the file") from None
