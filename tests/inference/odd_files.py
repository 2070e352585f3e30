"""Odd image files: cameras' turnings, rare pixels, animations, damage, bombs and what is no image at all.

`ODD_FILES` names each; `write_odd_files(folder)` writes them. The readable ones show the same picture, if they are large
enough: a red quarter at the top left, green at the top right, blue at the bottom left, and white.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
QUARTERS = (RED, GREEN, BLUE, WHITE)
GREY = tuple((luma,) * 3 for luma in (76, 150, 29, 255))
BLACK_AND_WHITE = tuple((luma,) * 3 for luma in (0, 255, 0, 255))


class OddFile(NamedTuple):
    """A file and what is to come of it."""

    name: str
    what: str  # in words, for a table
    make: Callable[[], bytes]
    quarters: tuple[tuple[int, ...], ...] | None = QUARTERS  # about what decoding is to give; None where nothing is to be seen
    reason: str | None = None  # a part of the reason for which it is refused; None where it is readable


def write_odd_files(folder: Path) -> list[Path]:
    """Writes all of them into a folder that is made for them; returns the paths in the order of `ODD_FILES`."""
    folder.mkdir(parents=True)
    for odd in ODD_FILES:
        (folder / odd.name).write_bytes(odd.make())
    return [folder / odd.name for odd in ODD_FILES]


# ---- pictures


def picture(size: int = 48, mode: str = "RGB") -> Image.Image:
    """The four quarters, square."""
    image = Image.new("RGB", (size, size), WHITE)
    half = size // 2
    for colour, corner in zip(QUARTERS[:3], ((0, 0), (half, 0), (0, half)), strict=True):
        image.paste(colour, (*corner, corner[0] + half, corner[1] + half))
    return image.convert(mode)


def see_through(size: int = 48, mode: str = "RGBA") -> Image.Image:
    """The four quarters, the white one being black that nothing is seen of."""
    image = picture(size, "RGBA")
    image.paste((0, 0, 0, 0), (size // 2, size // 2, size, size))
    return image.convert(mode)


def encoded(image: Image.Image, file_format: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **settings)
    return buffer.getvalue()


def jpeg(**settings: Any) -> bytes:
    return encoded(picture(), "JPEG", **{"quality": 95, "subsampling": 0, **settings})


def turned(orientation: int, file_format: str) -> bytes:
    """The picture as a camera stores it that was held otherwise, with the EXIF tag that says so."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture().transpose(Image.Transpose(undo[orientation])), file_format, exif=exif, quality=95)


def animated(file_format: str) -> bytes:
    """The picture, then frames of black."""
    black = [Image.new("RGB", (48, 48)), Image.new("RGB", (48, 48), (9, 9, 9))]
    return encoded(
        picture(), file_format, save_all=True, append_images=black, **({"lossless": True} if file_format == "WEBP" else {})
    )


# ---- PNGs that Pillow does not write


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *further: bytes, interlaced: bool = False) -> bytes:
    """A PNG of rows that begin with their filter's number. colour: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *further, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")))


def deep(mode: str, colour: int) -> bytes:
    """The picture in 16 bits a channel."""
    image = see_through(mode=mode) if mode.endswith("A") else picture(mode=mode)
    row = image.width * len(image.getbands())
    pixels = bytes(byte for value in image.tobytes() for byte in (value, value))
    rows = b"".join(b"\0" + pixels[start : start + 2 * row] for start in range(0, len(pixels), 2 * row))
    return png(image.width, image.height, 16, colour, rows)


def interlaced_png() -> bytes:
    """The picture in the seven passes of Adam7."""
    image = picture()
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    rows = b""
    for left, top, right, down in passes:
        for y in range(top, image.height, down):
            rows += b"\0" + b"".join(bytes(image.getpixel((x, y))) for x in range(left, image.width, right))  # type: ignore[arg-type]
    return png(image.width, image.height, 8, 2, rows, interlaced=True)


def with_chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG of the picture with one more chunk after its header."""
    whole = encoded(picture(), "PNG")
    return whole[:33] + chunk(kind, data) + whole[33:]


def broken_sum() -> bytes:
    """A PNG whose pixels do not fit the check sum."""
    before, kind, rest = encoded(picture(), "PNG").partition(b"IDAT")
    return before + kind + rest[:8] + bytes([rest[8] ^ 0xFF]) + rest[9:]


# ---- other files


def bmp(height: int, depth: int, compression: int, palette: bytes, data: bytes) -> bytes:
    colours = len(palette) // 4
    header = struct.pack("<IiiHHIIiiII", 40, 48, height, 1, depth, compression, len(data), 2835, 2835, colours, colours)
    start = 54 + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + header + palette + data


def run_length_bmp() -> bytes:
    """The picture as a BMP of 8 bits with run lengths."""
    palette = b"".join(bytes((blue, green, red, 0)) for red, green, blue in QUARTERS)
    rows = bytes((24, 2, 24, 3, 0, 0)) * 24 + bytes((24, 0, 24, 1, 0, 0)) * 24  # from the bottom up
    return bmp(48, 8, 1, palette, rows + b"\0\1")


def offset_gif() -> bytes:
    """A GIF whose first frame fills a part of the canvas only."""
    small = encoded(picture(24), "GIF")
    return small[:6] + struct.pack("<HH", 48, 48) + small[10:]


def cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


def zeroed(data: bytes, share: float) -> bytes:
    """A file whose end was never written, as after a loss of power."""
    return cut(data, share) + bytes(len(data) - int(len(data) * share))


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of far more pixels than its bytes would let one think."""
    return png(width, height, 1, 0, b"")


def scan_bomb(side: int = 4_000, scans: int = 3_000) -> bytes:
    """A progressive JPEG whose last scan is there again and again: small, of few pixels, and minutes to decode."""
    data = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


CUT = "cut short"
UNKNOWN = "not a JPEG, PNG, WebP, BMP or GIF"


ODD_FILES = (
    OddFile("plain.jpg", "JPEG", jpeg),
    OddFile("progressive.jpg", "progressive JPEG", lambda: jpeg(progressive=True)),
    OddFile("subsampled.jpg", "JPEG, colours at half size", lambda: jpeg(subsampling=2)),
    OddFile("restarts.jpg", "JPEG with restart markers", lambda: jpeg(restart_marker_blocks=1)),
    OddFile("grey.jpg", "grey JPEG", lambda: encoded(picture(mode="L"), "JPEG", quality=95), GREY),
    OddFile("cmyk.jpg", "CMYK JPEG", lambda: encoded(picture(mode="CMYK"), "JPEG", quality=95)),
    *(
        OddFile(f"turned-{orientation}.jpg", f"JPEG, EXIF orientation {orientation}", lambda o=orientation: turned(o, "JPEG"))
        for orientation in range(2, 9)
    ),
    OddFile("turned.webp", "WebP, EXIF orientation 6", lambda: turned(6, "WEBP")),
    OddFile("turned.png", "PNG, EXIF orientation 8", lambda: turned(8, "PNG")),
    OddFile("damaged-exif.jpg", "JPEG with damaged EXIF", lambda: jpeg(exif=b"Exif\0\0II*\0\xff\xff\xff\xffrubbish")),
    OddFile("two-pictures.jpg", "JPEG of two pictures (MPO)", lambda: animated("MPO")),
    OddFile("rest-behind.jpg", "JPEG with a megabyte of rubbish behind it", lambda: jpeg() + b"rubbish!" * 131072),
    OddFile("large.jpg", "JPEG of 24 megapixels", lambda: encoded(picture(4900), "JPEG", quality=75)),
    OddFile("named.png", "JPEG with the suffix of a PNG", jpeg),
    OddFile("no-suffix", "JPEG without a suffix", jpeg),
    OddFile("SHOUTED.JPG", "JPEG with its suffix in capitals", jpeg),
    OddFile("one-pixel.png", "PNG of one pixel", lambda: encoded(Image.new("RGB", (1, 1), RED), "PNG"), (RED,) * 4),
    OddFile("line.png", "PNG of 5,000 × 1 pixels", lambda: encoded(Image.new("RGB", (5000, 1), RED), "PNG"), (RED,) * 4),
    OddFile("column.jpg", "JPEG of 1 × 5,000 pixels", lambda: encoded(Image.new("RGB", (1, 5000), RED), "JPEG"), (RED,) * 4),
    OddFile("plain.png", "PNG", lambda: encoded(picture(), "PNG")),
    OddFile("interlaced.png", "interlaced PNG", interlaced_png),
    OddFile("grey.png", "grey PNG", lambda: encoded(picture(mode="L"), "PNG"), GREY),
    OddFile("bits.png", "PNG of 1 bit", lambda: encoded(picture(mode="L").convert("1", dither=0), "PNG"), BLACK_AND_WHITE),
    OddFile("palette.png", "PNG with a palette", lambda: encoded(picture().quantize(4), "PNG")),
    OddFile("alpha.png", "PNG, transparent in part", lambda: encoded(see_through(), "PNG")),
    OddFile("grey-alpha.png", "grey PNG, transparent in part", lambda: encoded(see_through(mode="LA"), "PNG"), GREY),
    OddFile("palette-alpha.png", "PNG with a transparent palette entry", lambda: encoded(see_through().quantize(8), "PNG")),
    OddFile("colour-alpha.png", "PNG with one transparent colour", lambda: encoded(picture(), "PNG", transparency=WHITE)),
    OddFile("deep-grey.png", "grey PNG of 16 bits", lambda: deep("L", 0), GREY),
    OddFile("deep.png", "PNG of 16 bits", lambda: deep("RGB", 2)),
    OddFile("deep-alpha.png", "PNG of 16 bits, transparent in part", lambda: deep("RGBA", 6)),
    OddFile("deep-grey-alpha.png", "grey PNG of 16 bits, transparent in part", lambda: deep("LA", 4), GREY),
    OddFile("animated.png", "animated PNG", lambda: animated("PNG")),
    OddFile("gamma.png", "PNG with a gamma of its own", lambda: with_chunk(b"gAMA", struct.pack(">I", 100_000))),
    OddFile("animated.gif", "animated GIF", lambda: animated("GIF")),
    OddFile("alpha.gif", "GIF, transparent in part", lambda: encoded(see_through(), "GIF")),
    OddFile("part.gif", "GIF whose first frame is smaller than its canvas", offset_gif, None),
    OddFile("plain.webp", "WebP", lambda: encoded(picture(), "WEBP", quality=95)),
    OddFile("lossless.webp", "lossless WebP", lambda: encoded(picture(), "WEBP", lossless=True)),
    OddFile("alpha.webp", "WebP, transparent in part", lambda: encoded(see_through(), "WEBP", lossless=True)),
    OddFile("animated.webp", "animated WebP", lambda: animated("WEBP")),
    OddFile("plain.bmp", "BMP", lambda: encoded(picture(), "BMP")),
    OddFile("palette.bmp", "BMP with a palette", lambda: encoded(picture().quantize(4), "BMP")),
    OddFile("runs.bmp", "BMP with run lengths", run_length_bmp),
    OddFile("top-down.bmp", "BMP whose first row is the top one", lambda: bmp(-48, 24, 0, b"", picture().tobytes("raw", "BGR"))),
    OddFile('blank in name, "quoted".jpg', "name with blank, comma and quotes", jpeg),
    OddFile("новый-図.jpg", "name of letters beyond ASCII", jpeg),
    OddFile("two\nlines.jpg", "name with a line break", jpeg),
    OddFile(os.fsdecode(b"latin-\xe9.jpg"), "name that is no UTF-8", jpeg),
    OddFile("[bold]tag[red].jpg", "name like a tag of the terminal's", jpeg),
    OddFile("empty.jpg", "empty file", lambda: b"", None, "empty"),
    OddFile("page.jpg", "HTML page named .jpg", lambda: b"<!doctype html><title>404</title>" * 20, None, UNKNOWN),
    OddFile("zeros.png", "nothing but zeros", lambda: bytes(5000), None, UNKNOWN),
    OddFile("behind-rubbish.jpg", "JPEG behind rubbish", lambda: b"rubbish!" + jpeg(), None, UNKNOWN),
    OddFile("half.jpg", "JPEG cut in half", lambda: cut(jpeg(), 0.5), None, CUT),
    OddFile("beginning.jpg", "first 20 bytes of a JPEG", lambda: jpeg()[:20], None, UNKNOWN),
    OddFile("zero-rest.jpg", "JPEG whose second half is zeros", lambda: zeroed(jpeg(), 0.6), None, CUT),
    OddFile("half-progressive.jpg", "progressive JPEG cut in half", lambda: cut(jpeg(progressive=True), 0.7), None, CUT),
    OddFile("half.png", "PNG cut in half", lambda: cut(encoded(picture(), "PNG"), 0.5), None, CUT),
    OddFile("sum.png", "PNG with a wrong check sum", broken_sum, None, "broken"),
    OddFile("nothing.png", "PNG of 0 × 0 pixels", lambda: png(0, 0, 8, 2, b""), None, UNKNOWN),
    OddFile("no-pixels.png", "PNG without pixels", lambda: png(48, 48, 8, 2, b""), None, CUT),
    OddFile("half.gif", "GIF cut in half", lambda: cut(encoded(picture(), "GIF"), 0.5), None, CUT),
    OddFile("half.webp", "WebP cut in half", lambda: cut(encoded(picture(), "WEBP"), 0.5), None, CUT),
    OddFile("half.bmp", "BMP cut in half", lambda: cut(encoded(picture(), "BMP"), 0.5), None, CUT),
    OddFile("bomb.png", "PNG of 60,000 × 60,000 pixels in 70 bytes", bomb, None, "pixels"),
    OddFile("long.png", "PNG of 2,000,000,000 × 1 pixels", lambda: bomb(2_000_000_000, 1), None, "pixels"),
    OddFile(
        "text-bomb.png",
        "PNG with 200 MB of packed text",
        lambda: with_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(200_000_000))),
        None,
        "packed text",
    ),
    OddFile("scan.tiff", "TIFF", lambda: encoded(picture(), "TIFF"), None, "a TIFF"),
    OddFile("scan.jpg", "TIFF named .jpg", lambda: encoded(picture(), "TIFF"), None, "a TIFF"),
    OddFile("photo.heic", "HEIC's beginning", lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200), None, "HEIC"),
    OddFile("photo.avif", "AVIF's beginning", lambda: b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(200), None, "AVIF"),
    OddFile("drawing.png", "SVG named .png", lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', None, UNKNOWN),
    OddFile("page.pdf", "PDF", lambda: b"%PDF-1.7\n" + bytes(200), None, "a PDF"),
)
