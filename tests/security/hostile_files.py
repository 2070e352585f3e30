"""Configurations, archives and images that try to run code, write to other places or exhaust memory."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from security.hostile_models import MKDIR, Maker, content, kernel_log

# A module of the working folder that creates the folder `ran` when imported, and a configuration that names it.
BESIDE = {
    "evil.py": "import os\nos.makedirs('ran', exist_ok=True)\nclass Evil: pass\ndef evil(*a, **k): pass\n",
    "callback.yaml": "class_path: evil.Evil\n",
}


def _config(text: str) -> Maker:
    return content(text.encode())


def _setting(name: str, value: str) -> Maker:
    return _config(f"trainer:\n  {name}: {value}\n")


def _beside_checkpoint(path: Path) -> None:
    """Put the callback into the run's config.yaml."""
    config = path.parent / "run" / "config.yaml"
    config.write_text(config.read_text().replace("callbacks: null", "callbacks: [{class_path: evil.Evil}]"))


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))

CONFIGS: dict[str, Maker] = {
    "!!python/object/apply:os.system": _setting("callbacks", "!!python/object/apply:os.system ['mkdir ran']"),
    "!!python/name:evil.evil": _setting("max_epochs", "!!python/name:evil.evil ''"),
    "a tag of its own": _setting("max_epochs", "!evil 3"),
    "a callback from the working folder": _setting("callbacks", "[{class_path: evil.Evil}]"),
    "the same without brackets": _setting("callbacks", "evil.Evil"),
    "the same in a referenced file": _setting("callbacks", "callback.yaml"),
    "the same in the config.yaml beside a checkpoint": _beside_checkpoint,
    "subprocess.Popen as logger": _setting("logger", "{class_path: subprocess.Popen, init_args: {args: [mkdir, ran]}}"),
    "os.system as profiler": _setting("profiler", "{class_path: os.system, init_args: {command: mkdir ran}}"),
    "a strategy": _setting("strategy", "{class_path: evil.Evil}"),
    "a plugin": _setting("plugins", "[evil.Evil]"),
    "an accelerator": _setting("accelerator", "{class_path: evil.Evil}"),
    "a function for a harmless callback": _setting(
        "callbacks", "[{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1, avg_fn: evil.evil}}]"
    ),
    "Lightning's LambdaCallback with os.abort": _setting(
        "callbacks", "[{class_path: LambdaCallback, init_args: {on_fit_start: os.abort}}]"
    ),
    "os.system through a module of Lightning": _setting(
        "callbacks",
        "[{class_path: lightning.pytorch.callbacks.early_stopping.os.system, init_args: {command: mkdir ran}}]",
    ),
    "a class as net option": _config("model:\n  net_options: {widths: {class_path: evil.Evil}}\n"),
    "10¹² values by aliases": _config(LAUGHS),
    "an alias of itself": _config("trainer: &a\n  callbacks: [*a]\n"),
    "30,000 brackets": _config("[" * 30_000),
    "a group that is a file": _config("trainer: callback.yaml\n"),
    "a megabyte of settings": _config("trainer:\n" + "".join(f"  a{n}: 1\n" for n in range(100_000))),
    "bytes that are not UTF-8": content(b"\xff\xfe\x00trainer: 1"),
}


def _archive(path: Path) -> None:
    """An archive with a member outside its folder."""
    info = tarfile.TarInfo("../ran")
    info.size = 1
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(info, io.BytesIO(b"x"))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 4 << 30)


def _batches(maker: Maker) -> Maker:
    """An unpacked archive whose files come from `maker`."""

    def make(path: Path) -> None:
        folder = path.parent / "cifar-10-batches-py"
        folder.mkdir()
        for name in ("data_batch_1", "data_batch_2", "test_batch", "batches.meta"):
            maker(folder / name)

    return make


ARCHIVES: dict[str, Maker] = {
    "a member called ../ran": _archive,
    "a sparse archive of 4 GB": _sparse,
    "an archive that is a named pipe": os.mkfifo,
    "an archive that is a link to the kernel log": kernel_log,
    "batches that are links to the kernel log": _batches(kernel_log),
    "batches that are gadgets": _batches(content(pickle.dumps(MKDIR))),
    "sparse batches of 4 GB": _batches(_sparse),
}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(header: bytes, pixels: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with these contents of IHDR and IDAT, and other chunks between them."""
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _png(width: int, height: int, pixels: Callable[[], bytes], chunk: bytes = b"", zeros: int = 0) -> Maker:
    """A grey PNG that claims this size, with a `chunk` that ends in compressed zeros."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return content(lambda: png(header, pixels(), *([(chunk[:4], chunk[4:] + _zeros(zeros))] if chunk else [])))


def _rgba(side: int, zeros: int) -> Maker:
    """A transparent PNG that claims this size, with this many bytes of pixels."""
    return content(lambda: png(struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0), _zeros(zeros)))


def _zeros(count: int) -> bytes:
    """Return compressed zeros."""
    compressor = zlib.compressobj(1)
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(count >> 20)), compressor.flush()])


def _jpeg_claim() -> bytes:
    data = bytearray(_encoded("JPEG"))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


def _encoded(kind: str, side: int = 8, **settings: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, kind, **settings)
    return file.getvalue()


def progressive_jpeg(scans: int, side: int = 8) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    data = _encoded("JPEG", side, progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * scans + b"\xff\xd9"


def _scans_behind_an_end() -> bytes:
    """1,000 scans behind a comment that contains an end-of-image marker."""
    data = progressive_jpeg(1000, 1000)
    start = data.index(b"\xff\xda")
    return data[:start] + b"\xff\xfe\0\4\xff\xd9" + data[start:]


def jpeg_with(segment: bytes, count: int) -> bytes:
    data = _encoded("JPEG")
    return data[:2] + segment * count + data[2:]


def png_with_chunks(count: int) -> bytes:
    """A PNG with empty chunks of an unknown kind."""
    return png(struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0), zlib.compress(bytes(72)), *[(b"prVt", b"")] * count)


def gif_with_blocks(count: int) -> bytes:
    """A GIF with a comment in blocks of one byte."""
    data = _encoded("GIF")
    start = data.index(b",", 13 + (3 << (data[10] % 8 + 1)))
    return data[:start] + b"!\xfe" + b"\1a" * count + b"\0" + data[start:]


def _webp_claim(side: int, animated: bool) -> bytes:
    """A WebP of about 100 bytes that claims this many pixels a side."""
    frames = {"save_all": True, "append_images": [Image.new("RGB", (8, 8), "red")]} if animated else {}
    data = bytearray(_encoded("WEBP", lossless=True, **frames))
    if animated:
        data[24:30] = (side - 1).to_bytes(3, "little") * 2
    else:
        claim = struct.unpack("<I", data[21:25])[0] >> 28 << 28
        data[21:25] = struct.pack("<I", claim | (side - 1) << 14 | side - 1)
    return bytes(data)


def _packed_bmp(width: int) -> bytes:
    """A run-length encoded BMP with one row, cut off after its first pixel."""
    pixels = b"\1\0\0\0\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, width, 1, 1, 8, 1, len(pixels), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(pixels), 0, 0, 1078) + header + bytes(1024) + pixels


def tiff(width: int, height: int, tags: Sequence[tuple[int, int, int, int]] = (), rest: bytes = b"") -> bytes:
    """A grey TIFF that claims this size, with other tags (number, type, count, value) and data behind them."""
    own = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, 5), 262: (3, 1, 1), 273: (4, 1, 200),
           277: (3, 1, 1), 278: (4, 1, height), 279: (4, 1, 100)}  # fmt: skip
    own |= {tag: values for tag, *values in tags}  # type: ignore[misc]
    entries = b"".join(struct.pack("<HHII", tag, *values) for tag, values in sorted(own.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(own)) + entries + bytes(4) + rest


def _many_tags(count: int) -> list[tuple[int, int, int, int]]:
    return [(40000 + number, 1, 20 << 20, 200) for number in range(count)]


def _exif_tags() -> bytes:
    """A TIFF whose EXIF directory, behind its own one, claims much more than the file holds."""
    plain = tiff(8, 8, [(34665, 4, 1, 0)])
    inner = b"".join(struct.pack("<HHII", *tag) for tag in _many_tags(900))
    directory = struct.pack("<H", 900) + inner + bytes(4)
    return tiff(8, 8, [(34665, 4, 1, len(plain))], directory + bytes(20 << 20))


def _avif_claim(claimed: int, side: int = 8) -> bytes:
    data = bytearray(_encoded("AVIF", side, quality=1, speed=10))
    start = data.index(b"ispe") + 8
    data[start : start + 8] = struct.pack(">II", claimed, claimed)
    return bytes(data)


TILE = [(322, 4, 1, 60000), (323, 4, 1, 60000), (324, 4, 1, 200), (325, 4, 1, 100)]
FILL = b"\xff" * 65535
EXIF = b"\xff\xe1\xff\xffExif\0\0" + bytes(65535 - 8)
BMP = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 200, 0, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0)
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch ran) (w) file\n"

# Valid images: the surplus pixels are never read.
READ = {
    "a PNG with 200 MB of surplus pixels",
    "an AVIF of 4 KB that claims 8 × 8 and holds 6500 × 6500",
    "a link to a folder above",
}

IMAGES: dict[str, Maker] = {
    "a PNG of 100 bytes that claims 65535 × 65535": _png(65535, 65535, lambda: _zeros(0)),
    "a PNG that claims 9000 × 9000 and holds no pixels": _rgba(9000, 0),
    "a PNG of 9400 × 9400 transparent pixels in 300 KB": _rgba(9400, 338 << 20),
    "a PNG with 200 MB of surplus pixels": _png(8, 9, lambda: _zeros(200 << 20)[:100_000]),
    "a PNG with 200 MB of text": _png(8, 8, lambda: zlib.compress(bytes(72)), b"zTXtComment\0\0", 200 << 20),
    "a PNG with a colour profile of 200 MB": _png(8, 8, lambda: _zeros(0), b"iCCPp\0\0", 200 << 20),
    "a GIF that claims 65535 × 65535": content(b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\0;"),
    "a BMP that claims 60000 × 60000": content(BMP),
    "a JPEG that claims 65500 × 65500": content(_jpeg_claim),
    "a progressive JPEG of 1,000 scans": content(lambda: progressive_jpeg(1000, 1000)),
    "the same with an end-of-image marker in a comment": content(_scans_behind_an_end),
    "a progressive JPEG of 60 scans of 6100 × 6100": content(lambda: progressive_jpeg(60, 6100)),
    "a progressive JPEG of 8500 × 8500": content(lambda: progressive_jpeg(1, 8500)),
    "a JPEG with 500 EXIF segments": content(lambda: jpeg_with(EXIF, 500)),
    "a JPEG with a million comments": content(lambda: jpeg_with(b"\xff\xfe\0\2", 1_000_000)),
    "a JPEG with 20 MB of fill bytes before its first segment": content(lambda: jpeg_with(b"\xff", 20_000_000)),
    "a JPEG with fill bytes in segments without a length": content(lambda: jpeg_with(b"\xff\xf0" + FILL, 390)),
    "a PNG of 300,000 empty chunks": content(lambda: png_with_chunks(300_000)),
    "a GIF with a comment of three million blocks": content(lambda: gif_with_blocks(3_000_000)),
    "a GIF with 20 MB of junk before its first block": content(lambda: _encoded("GIF")[:13] + b"a" * 20_000_000),
    "a WebP animation of 100 bytes that claims 5701 × 5701": content(lambda: _webp_claim(5701, True)),
    "a WebP of 40 bytes that claims 5701 × 5701": content(lambda: _webp_claim(5701, False)),
    "a run-length encoded BMP of 33 million pixels, cut off after the first": content(lambda: _packed_bmp(33_000_000)),
    "a TIFF of 100 bytes that claims 60000 × 60000": content(lambda: tiff(60000, 60000)),
    "a TIFF that claims 9000 × 9000 and holds no pixels": content(lambda: tiff(9000, 9000)),
    "a TIFF of 20 MB whose 900 tags all claim them": content(lambda: tiff(8, 8, _many_tags(900), bytes(20 << 20))),
    "a TIFF of 20 MB with five million strips": content(lambda: tiff(8, 8, [(273, 4, 5 << 20, 200)], bytes(20 << 20))),
    "a TIFF of 8 × 8 pixels with a tile of 60000 × 60000": content(lambda: tiff(8, 8, TILE, bytes(200))),
    "a TIFF whose EXIF is its own directory": content(lambda: tiff(8, 8, [(34665, 4, 1, 8)])),
    "a TIFF whose EXIF has 900 tags that claim 20 MB each": content(_exif_tags),
    "a PPM that claims 60000 × 60000": content(b"P6 60000 60000 255\n"),
    "a PPM with a comment of 20 MB": content(lambda: b"P6\n#" + b"x" * (20 << 20) + b"\n2 2\n255\n" + bytes(12)),
    "a PPM with a comment of 20 MB behind its header": content(lambda: b"P6 2 2 255#" + b"x" * (20 << 20) + b"\n" * 13),
    "a PPM of text with 25 million pixels": content(lambda: b"P3 5000 5000 255\n" + b"1 " * (75 << 20)),
    "a PPM of 12 bits with 25 million pixels": content(lambda: b"P6 5000 5000 4095\n" + bytes(150_000_000)),
    "an AVIF of a kilobyte that claims 65535 × 65535": content(lambda: _avif_claim(65535)),
    "an AVIF of 4 KB that claims 8 × 8 and holds 6500 × 6500": content(lambda: _avif_claim(8, 6500)),
    "PostScript that would start ghostscript": content(POSTSCRIPT),
    "a named pipe": os.mkfifo,
    "a link to the kernel log": kernel_log,
    "a link to a folder above": lambda path: path.symlink_to(".."),
}
