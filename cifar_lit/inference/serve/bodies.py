"""The images in the body of a request: raw, in a form, or as base64 in JSON."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for."""

    body: int = 10_000_000  # bytes
    pixels: int = 25_000_000  # of one image, as its header says, before anything is decoded
    images: int = 64
    decode_seconds: float = (
        0.5  # of a CPU for a request's images, after which the decoder is killed; starting another takes 0.3
    )
    body_seconds: float = 10.0  # that a client may pause for; one that is slow uses them up
    answer_seconds: float = 20.0  # in which a request that is here must be answered
    requests: int = 64  # at a time; further ones get 503


class RequestError(Exception):
    """A request that is answered with an HTTP status of 4xx or 5xx and one line that names the remedy."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


MAX_FIELDS = 64  # of a form or a JSON object, beside its images
MAX_PART_HEADER_BYTES = 2048  # a file's name and type
BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^";\s]+))', re.IGNORECASE)
FILE_NAME = re.compile(  # for errors only; `email.parser` fails on some in ways of its own
    rb'^content-disposition:.*;\s*filename(\*?)=(?:"((?:\\.|[^"\\])*)"|([^;\r\n]*))', re.IGNORECASE | re.MULTILINE
)
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
        images = Images(_form_files(content_type, body, limits), many=True)
    elif kind == "application/json":
        images = _json_images(body, limits)
    else:  # application/x-www-form-urlencoded is what `curl --data-binary` says by default
        raise RequestError(415, f"the type {kind[:80]!r} is not taken: {WAYS}; with curl, use -F image=@FILE")
    if not images.files:
        raise RequestError(400, f"there is no image in the request: {WAYS}")
    if len(images.files) > limits.images:
        raise RequestError(413, f"{len(images.files)} images are too many: at most {limits.images} in one request")
    for name, data in images.files:
        if not data:
            raise RequestError(400, f"{name} is empty: {WAYS}")
        known = data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF87a", b"GIF89a"))
        if not known and not (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):  # which needs no decoder
            raise RequestError(415, f"{name} is not a JPEG, PNG, WebP, BMP or GIF: convert it to one of these")
    return images


def _form_files(content_type: str, body: bytes, limits: Limits) -> list[tuple[str, bytes]]:
    """The files of a form (RFC 7578); fields that are no files say nothing here and are left out."""
    boundary = BOUNDARY.search(content_type)
    delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1", "replace") if boundary else b"\r\n"
    parts = (b"\r\n" + body).split(
        delimiter, 2 * limits.images + MAX_FIELDS
    )  # so that an image too many is named as such
    if boundary and delimiter in parts[-1]:
        raise RequestError(413, f"the form has too many parts: at most {limits.images} images in one request")
    if not boundary or len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError(400, "the form has no boundary, is cut short or damaged: send it again")
    files: list[tuple[str, bytes]] = []
    for part in parts[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        if len(head) > MAX_PART_HEADER_BYTES:
            text = f"a part of the form has more than {MAX_PART_HEADER_BYTES} bytes of headers: give its file a shorter name"
            raise RequestError(413, text)
        if match := FILE_NAME.search(head.replace(b"\r\n ", b" ")):
            encoded, quoted, bare = (group.decode("utf-8", "replace") for group in match.groups(b""))
            name = unquote(bare.rpartition("'")[2]) if encoded else re.sub(r"\\(.)", r"\1", quoted or bare)
            printable = "".join(letter if letter.isprintable() else "?" for letter in name)[:80]
            files.append((f"image {len(files) + 1} ({printable or 'without a name'})", data))
    return files


def _json_images(body: bytes, limits: Limits) -> Images:
    example = '{"image": "<base64>"} or {"images": ["<base64>", …]}'
    if (
        sum(body.count(mark) for mark in (b",", b"[", b"{")) > 3 * limits.images + MAX_FIELDS
    ):  # objects take 25 times their bytes
        raise RequestError(
            400, f"the body is not valid JSON, or holds more than {limits.images} images: send {example}"
        )
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, f"the body is not valid JSON: send {example}") from None
    if not isinstance(content, dict) or len(content.keys() & {"image", "images"}) != 1:
        raise RequestError(422, f'the JSON must hold either "image" or "images": {example}')
    if "image" in content:
        return Images([("the image", _from_base64("the image", content["image"]))], many=False)
    if not isinstance(content["images"], list):
        raise RequestError(422, f'"images" must be a list: {example}')
    named = ((f"image {number}", text) for number, text in enumerate(content["images"], 1))
    return Images([(name, _from_base64(name, text)) for name, text in named], many=True)


def _from_base64(name: str, text: object) -> bytes:
    """The bytes of a base64 text, which may be a data: URL and may be folded into lines."""
    try:
        if not isinstance(text, str):
            raise ValueError(text)
        url_data = text.partition(",")[2] if text.startswith("data:") else text
        return base64.b64decode(url_data.encode().translate(None, b" \t\r\n"), validate=True)
    except ValueError:
        raise RequestError(422, f"{name} is not valid base64: encode the file's bytes, all of them") from None
