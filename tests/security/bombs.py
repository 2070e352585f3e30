"""Small image files that take long to decode, or much memory."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image


def zip_bomb(side: int = 30_000) -> bytes:
    """A PNG of side × side black and white pixels in about 100 kB."""
    packer = zlib.compressobj(9)
    row = bytes(side // 8 + 2)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return png(struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), pixels)


def png(header: bytes, pixels: bytes, *further: tuple[bytes, bytes]) -> bytes:
    """A PNG of these contents of IHDR and IDAT, with further chunks between them."""
    chunks = [(b"IHDR", header), *further, (b"IDAT", pixels), (b"IEND", b"")]
    packed = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def scan_bomb(side: int = 4_000, scans: int = 3_000) -> bytes:
    """A progressive JPEG whose last scan is there again and again: small, of few pixels, and minutes to decode."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]
