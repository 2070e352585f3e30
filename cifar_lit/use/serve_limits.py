"""What the service takes, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass


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
