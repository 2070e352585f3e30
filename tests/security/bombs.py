"""What a service must refuse, and what came of it."""

from __future__ import annotations

import asyncio
import io
import struct
import time
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image

from cifar_lit.bench.service import Connection, Service, error_of, once, predict_request


class BadInput(NamedTuple):
    """A request that is to be refused. request: its bytes, or as much as is sent of it."""

    name: str
    request: bytes


class Verdict(NamedTuple):
    """The status of an answer, its error, the seconds until it came, and whether a good request after it was answered."""

    status: int
    answer: str
    seconds: float
    goes_on: bool


def bad_inputs() -> list[BadInput]:
    """The bad inputs, each with its name."""
    good = small_jpegs(1)[0]
    return [
        BadInput("cut JPEG", predict_request(good[: len(good) // 2])),
        BadInput("PNG of 900 million pixels", predict_request(zip_bomb(), "image/png")),
        BadInput("JPEG of 3,000 scans", predict_request(scan_bomb())),
        BadInput("body of 100 MB", predict_request(bytes(100_000_000))),
        BadInput("text as an image", predict_request(b"this is no image", "image/png")),
        BadInput("wrong type", predict_request(good, "text/plain")),
        BadInput("slow client", predict_request(good)[:-1]),  # the last byte never comes
    ]


def judge(service: Service, bad: BadInput, good: bytes) -> Verdict:
    """Sends a bad input to a service, and a good request after it."""

    async def sent() -> Verdict:
        before = time.perf_counter()
        connection = await Connection.to(service)
        try:
            status, body = await connection.ask(bad.request)
        finally:
            connection.close()
        seconds = time.perf_counter() - before
        return Verdict(status, error_of(body), round(seconds, 4), (await once(service, good))[0] == 200)

    return asyncio.run(sent())


def small_jpegs(count: int) -> list[bytes]:
    """JPEGs of 32 × 32 soft colours, of about the size of CIFAR-10's."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        soft = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((32, 32), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        soft.save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def zip_bomb(side: int = 30_000) -> bytes:
    """A PNG of side × side black and white pixels in about 100 kB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(side // 8 + 2)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def scan_bomb(side: int = 4_000, scans: int = 3_000) -> bytes:
    """A progressive JPEG whose last scan is there again and again: small, of few pixels, and minutes to decode."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]
