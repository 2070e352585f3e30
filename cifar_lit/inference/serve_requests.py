"""From the body of a request to the files in it: raw, as a form, or as base64 in JSON."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any, NamedTuple

# ---- What the service takes, and how it says no.


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for.

    body: bytes of a request's body. pixels: of one image, as its header says, before anything is decoded. images: in one
    request. decode_seconds: for one image, after which its decoder is killed. body_seconds: in which a request must have
    arrived as a whole. answer_seconds: in which it must be answered after that. requests: at a time; further ones are told
    to come back.
    """

    body: int = 10_000_000
    pixels: int = 25_000_000
    images: int = 64
    decode_seconds: float = 2.0
    body_seconds: float = 10.0
    answer_seconds: float = 20.0
    requests: int = 128


class Refused(Exception):
    """A request that is answered with an HTTP status of 4xx or 5xx and one line that names the remedy."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status, self.text = status, text


def megabytes(count: int) -> str:
    """A number of bytes as in `10 MB` or `0.5 MB`."""
    return f"{count / 1e6:g} MB"


WAYS = "send one image as the body with its type (image/jpeg), a form with files (multipart/form-data), or JSON with base64"


class Asked(NamedTuple):
    """The files of a request, each with the name that errors call it by; whether it is answered as a list."""

    files: list[tuple[str, bytes]]
    many: bool


def asked_for(content_type: str, body: bytes, limits: Limits) -> Asked:
    """The files in a body of this type; raises Refused for other types, for damaged bodies, none or too many images."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind in ("application/octet-stream", ""):
        asked = Asked([("the image", body)], many=False)
    elif kind == "multipart/form-data":
        asked = Asked(_form_files(content_type, body), many=True)
    elif kind == "application/json":
        asked = _json_images(body)
    elif kind == "application/x-www-form-urlencoded":  # what `curl --data-binary` says when told nothing
        raise Refused(415, f"the body is said to be {kind}: with curl, add -H 'Content-Type: image/jpeg', or use -F image=@FILE")
    else:
        raise Refused(415, f"the type {kind[:80]!r} is not taken: {WAYS}")
    if not asked.files:
        raise Refused(400, f"there is no image in the request: {WAYS}")
    if len(asked.files) > limits.images:
        raise Refused(413, f"{len(asked.files)} images are too many: at most {limits.images} in one request")
    for name, data in asked.files:
        _refuse_other(name, data)
    return asked


def _refuse_other(name: str, data: bytes) -> None:
    """Refuses by its first bytes what is none of the five formats, without a decoder."""
    if not data:
        raise Refused(400, f"{name} is empty: {WAYS}")
    known = data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF87a", b"GIF89a"))
    if not known and not (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):
        raise Refused(415, f"{name} is not a JPEG, PNG, WebP, BMP or GIF: convert it to one of these")


# ---- forms


def _form_files(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """The files of a form (RFC 7578); fields that are no files say nothing here and are left out."""
    boundary = _header("content-type", content_type).get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise Refused(400, "the form has no boundary: leave its Content-Type to the program that makes the form")
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(delimiter)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise Refused(400, "the form is cut short or damaged: send it again")
    files: list[tuple[str, bytes]] = []
    for part in parts[1:-1]:
        head, found, data = part.partition(b"\r\n\r\n")
        if not found:
            raise Refused(400, "a part of the form has no headers: send it again")
        headers = BytesHeaderParser().parsebytes(head.lstrip(b"\r\n"))
        name = headers.get_filename()
        if name is not None:
            files.append((f"image {len(files) + 1} ({shown(name)})", data))
    return files


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value.replace("\r", " ").replace("\n", " ")
    return message


def shown(name: str) -> str:
    """A file's name as an error may quote it: printable and short."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:80] or "without a name"


# ---- JSON


def _json_images(body: bytes) -> Asked:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, 'the body is not valid JSON: send {"image": "<base64>"} or {"images": ["<base64>", …]}') from None
    if not isinstance(found, dict) or len(found.keys() & {"image", "images"}) != 1:
        raise Refused(422, 'the JSON must hold either "image" or "images": {"image": "<base64>"} or {"images": ["<base64>", …]}')
    if "image" in found:
        return Asked([("the image", _from_base64("the image", found["image"]))], many=False)
    if not isinstance(found["images"], list):
        raise Refused(422, '"images" must be a list of base64 texts; for one image, send {"image": "<base64>"}')
    names = [f"image {number}" for number in range(1, len(found["images"]) + 1)]
    files = [(name, _from_base64(name, text)) for name, text in zip(names, found["images"], strict=True)]
    return Asked(files, many=True)


def _from_base64(name: str, text: object) -> bytes:
    """The bytes of a base64 text, which may be a data: URL and may be folded into lines."""
    if not isinstance(text, str):
        raise Refused(422, f"{name} must be a base64 text, not {type(text).__name__}")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise Refused(422, f"{name} is not valid base64: encode the file's bytes, all of them") from None
