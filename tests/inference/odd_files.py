"""Unusual and damaged image files: EXIF rotation, rare pixel formats, animations, bombs and other file types.

Readable ones of sufficient size show four quarters: red and green at the top, blue and white at the bottom.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
GREY = tuple((luma,) * 3 for luma in (76, 150, 29, 255))
CUT, UNKNOWN = "cut short", "not a JPEG, PNG, WebP, BMP, GIF, TIFF, PPM"


class OddFile(NamedTuple):
    """A file, its description, and the colours of its quarters or a part of the error message."""

    name: str
    what: str
    data: bytes
    expected: tuple[tuple[int, ...], ...] | str = (RED, GREEN, BLUE, WHITE)


def picture(size: int = 48, mode: str = "RGB", clear: bool = False) -> Image.Image:
    """Return the square with four quarters; with `clear`, transparent black replaces white."""
    image = Image.new("RGBA", (size, size), (0, 0, 0, 0) if clear else WHITE)
    half = size // 2
    for colour, left, top in ((RED, 0, 0), (GREEN, half, 0), (BLUE, 0, half)):
        image.paste(colour, (left, top, left + half, top + half))
    return image.convert(mode)


def encoded(image: Image.Image, file_format: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **settings)
    return buffer.getvalue()


def jpeg(image: Image.Image | None = None, **settings: Any) -> bytes:
    return encoded(image or picture(), "JPEG", **{"quality": 95, "subsampling": 0, **settings})


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, rows: bytes) -> bytes:
    """Return an RGB PNG. Each row begins with the number of its filter."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """Return a tiny PNG whose header declares very many pixels."""
    return png(60_000, 60_000, 8, b"")


def cut(data: bytes, share: float = 0.5) -> bytes:
    return data[: int(len(data) * share)]


def odd_files() -> list[OddFile]:
    clear, turned = picture(mode="RGBA", clear=True), picture().transpose(Image.Transpose.ROTATE_90)
    black = {"save_all": True, "append_images": [Image.new("RGB", (48, 48), (grey,) * 3) for grey in (0, 9)]}
    exif = Image.Exif()
    exif[0x0112] = 6
    rows = [np.repeat(row, 2).tobytes() for row in np.asarray(picture()).reshape(48, 144)]
    deep = b"".join(b"\0" + row for row in rows)  # 16 bits: each byte twice
    head, kind, rest = encoded(picture(), "PNG").partition(b"IDAT")
    grey = picture(mode="L")
    deep_grey = grey.convert("I").point(lambda value: value * 257).convert("I;16")
    pixels = " ".join(map(str, np.asarray(picture()).ravel()))
    text_ppm = f"P3 # of text\n48 48\n# white:\n255\n{pixels}\n".encode()
    readable = [
        OddFile("cmyk.jpg", "CMYK JPEG", jpeg(picture().convert("CMYK"))),
        OddFile("turned.jpg", "JPEG, EXIF orientation 6", jpeg(turned, exif=exif)),
        OddFile("damaged-exif.jpg", "JPEG with damaged EXIF", jpeg(exif=b"Exif\0\0II*\0\xff\xff\xff\xffrubbish")),
        OddFile("two-pictures.jpg", "JPEG of two pictures (MPO)", encoded(picture(), "MPO", **black)),
        OddFile("one-pixel.png", "PNG of one pixel", encoded(Image.new("RGB", (1, 1), RED), "PNG"), (RED,) * 4),
        OddFile("alpha.png", "partly transparent PNG", encoded(clear, "PNG")),
        OddFile("palette-alpha.png", "PNG with a transparent palette entry", encoded(clear.quantize(8), "PNG")),
        OddFile("deep-grey.png", "grey PNG of 16 bits", encoded(deep_grey, "PNG"), GREY),
        OddFile("deep.png", "PNG of 16 bits", png(48, 48, 16, deep)),
        OddFile("animated.gif", "animated GIF", encoded(picture(), "GIF", **black)),
        OddFile("text.ppm", "PPM of text with comments", text_ppm),
        OddFile("turned.avif", "AVIF, EXIF orientation 6", encoded(turned, "AVIF", exif=exif, quality=95)),
        OddFile("новый-図.jpg", "name with non-ASCII letters", jpeg()),
        OddFile(os.fsdecode(b"latin-\xe9.jpg"), "name that is not valid UTF-8", jpeg()),
        OddFile("[bold]tag[red].jpg", "name that looks like console markup", jpeg()),
    ]
    refused = [
        OddFile("empty.jpg", "empty file", b"", "empty"),
        OddFile("page.jpg", "HTML page named .jpg", b"<!doctype html><title>404</title>" * 20, UNKNOWN),
        OddFile("half.jpg", "JPEG cut in half", cut(jpeg()), CUT),
        OddFile(
            "sum.png",
            "PNG with a wrong checksum",
            head + kind + rest[:8] + bytes([rest[8] ^ 255]) + rest[9:],
            "broken",
        ),
        OddFile("bomb.png", "PNG of 60,000 × 60,000 pixels in 70 bytes", bomb(), "pixels"),
        OddFile("photo.avif", "first bytes of an AVIF", b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(200), "damaged"),
    ]
    return readable + refused
