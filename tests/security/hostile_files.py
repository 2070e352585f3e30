"""Configurations, archives and images that want to run code, to write elsewhere, or to take memory."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from security.hostile_models import Gadget, Maker
from security.sandbox import Sandbox

EVIL = "import os\nos.makedirs({trace!r}, exist_ok=True)\nclass Evil: pass\ndef evil(*a, **k): pass\n"


def _config(text: str, beside_checkpoint: bool = False) -> Maker:
    """A configuration with `text`; `evil` in it is a module in the working folder whose import leaves the trace."""

    def make(sandbox: Sandbox) -> Path:
        (sandbox.folder / "evil.py").write_text(EVIL.format(trace=str(sandbox.trace)))
        (sandbox.folder / "callback.yaml").write_text("class_path: evil.Evil\n")
        filled = text.replace("TRACE", str(sandbox.trace))
        if not beside_checkpoint:
            (sandbox.folder / "own.yaml").write_text(filled)
            return sandbox.folder / "own.yaml"
        path = sandbox.run / "config.yaml"
        path.write_text(path.read_text().replace("callbacks: null", filled))
        return sandbox.checkpoint

    return make


def _config_bytes(content: Callable[[], bytes]) -> Maker:
    def make(sandbox: Sandbox) -> Path:
        (sandbox.folder / "own.yaml").write_bytes(content())
        return sandbox.folder / "own.yaml"

    return make


def _setting(name: str, value: str) -> Maker:
    return _config(f"trainer:\n  {name}: {value}\n")


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))

CONFIGS: dict[str, Maker] = {
    "!!python/object/apply:os.system": _setting("callbacks", "!!python/object/apply:os.system ['mkdir TRACE']"),
    "!!python/object/new:subprocess.Popen": _setting("callbacks", "!!python/object/new:subprocess.Popen [[mkdir, TRACE]]"),
    "!!python/name:evil.evil": _setting("max_epochs", "!!python/name:evil.evil ''"),
    "!!python/module:evil": _setting("max_epochs", "!!python/module:evil ''"),
    "a tag of its own": _setting("max_epochs", "!evil 3"),
    "a callback from the working folder": _setting("callbacks", "[{class_path: evil.Evil}]"),
    "the same, without brackets": _setting("callbacks", "evil.Evil"),
    "the same, in a file that it points to": _setting("callbacks", "callback.yaml"),
    "the same, in the config.yaml beside a checkpoint": _config("callbacks: [{class_path: evil.Evil}]", beside_checkpoint=True),
    "subprocess.Popen as logger": _setting("logger", "{class_path: subprocess.Popen, init_args: {args: [mkdir, TRACE]}}"),
    "os.system as profiler": _setting("profiler", "{class_path: os.system, init_args: {command: mkdir TRACE}}"),
    "a strategy": _setting("strategy", "{class_path: evil.Evil}"),
    "a plugin": _setting("plugins", "[evil.Evil]"),
    "an accelerator": _setting("accelerator", "{class_path: evil.Evil}"),
    "a function for a harmless callback": _setting(
        "callbacks", "[{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1, avg_fn: evil.evil}}]"
    ),
    "Lightning's LambdaCallback with os.abort": _setting(
        "callbacks", "[{class_path: LambdaCallback, init_args: {on_fit_start: os.abort}}]"
    ),
    "os through a module of Lightning's": _setting(
        "callbacks", "[{class_path: lightning.pytorch.callbacks.early_stopping.os.system, init_args: {command: mkdir TRACE}}]"
    ),
    "a class as net option": _config("model:\n  net_options: {widths: {class_path: evil.Evil}}\n"),
    "10¹² values by aliases": _config(LAUGHS),
    "an alias of itself": _config("trainer: &a\n  callbacks: [*a]\n"),
    "30,000 brackets": _config("[" * 30_000),
    "a group that is a file": _config("trainer: callback.yaml\n"),
    "a megabyte of settings": _config("trainer:\n" + "".join(f"  a{n}: 1\n" for n in range(100_000))),
    "bytes that are no text": _config_bytes(lambda: b"\xff\xfe\x00trainer: 1"),
    "a NUL in the text": _config_bytes(lambda: b"trainer:\n  max_epochs: \x00\n"),
    "random bytes": _config_bytes(lambda: os.urandom(2000)),
}


def _archive(member: Callable[[Sandbox], tuple[tarfile.TarInfo, bytes]]) -> Maker:
    """CIFAR-10's archive with one member of another's making."""

    def make(sandbox: Sandbox) -> Path:
        path = sandbox.folder / "cifar-10-python.tar.gz"
        info, data = member(sandbox)
        with tarfile.open(path, "w:gz") as tar:
            tar.addfile(info, io.BytesIO(data))
        return path

    return make


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def _hole(name: str) -> Maker:
    def make(sandbox: Sandbox) -> Path:
        (sandbox.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (sandbox.folder / name).open("wb") as file:
            file.truncate(4 << 30)
        return sandbox.folder / name

    return make


def _gzip_bomb(sandbox: Sandbox) -> Path:
    path = sandbox.folder / "cifar-10-python.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    return path


def _special(name: str, make: Callable[[Path], None]) -> Maker:
    def made(sandbox: Sandbox) -> Path:
        (sandbox.folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(sandbox.folder / name)
        return sandbox.folder / name

    return made


def _batch_gadget(sandbox: Sandbox) -> Path:
    folder = sandbox.folder / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Gadget(os.mkdir, str(sandbox.trace))))
    return folder / "data_batch_1"


ARCHIVE = "cifar-10-python.tar.gz"

ARCHIVES: dict[str, Maker] = {
    "a member called ../ran": _archive(lambda sandbox: _member("../ran")),
    "a member with an absolute path": _archive(lambda sandbox: _member(str(sandbox.trace))),
    "a link out of the folder": _archive(lambda sandbox: _member("cifar-10-batches-py", tarfile.SYMTYPE, "/tmp")),
    "a hard link to /etc/passwd": _archive(lambda sandbox: _member("cifar-10-batches-py/meta", tarfile.LNKTYPE, "/etc/passwd")),
    "a device": _archive(lambda sandbox: _member("cifar-10-batches-py/data_batch_1", tarfile.CHRTYPE)),
    "a named pipe in it": _archive(lambda sandbox: _member("cifar-10-batches-py/data_batch_1", tarfile.FIFOTYPE)),
    "300 MB of zeros in 1 MB": _gzip_bomb,
    "an archive of 4 GB, all of it a hole": _hole(ARCHIVE),
    "an archive that is a named pipe": _special(ARCHIVE, os.mkfifo),
    "an archive that is a link to /dev/zero": _special(ARCHIVE, lambda path: path.symlink_to("/dev/zero")),
    "batches that are gadgets": _batch_gadget,
    "a batch of 4 GB, all of it a hole": _hole("cifar-10-batches-py/data_batch_1"),
}


def _png(width: int, height: int, pixels: bytes, *further: tuple[bytes, bytes], mode: int = 0) -> bytes:
    """A PNG of 8-bit grey (mode 0) or RGBA (6) with this claim of its size."""
    return png(struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0), pixels, *further)


def _zeros(count: int) -> bytes:
    packer = zlib.compressobj(1)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(count >> 20)), packer.flush()])


def _image(content: Callable[[Sandbox], bytes], name: str = "0.png") -> Maker:
    def make(sandbox: Sandbox) -> Path:
        path = sandbox.folder / "images" / "a" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content(sandbox))
        return path

    return make


def _text_bomb(sandbox: Sandbox) -> bytes:
    return _png(8, 8, zlib.compress(bytes(72)), (b"zTXt", b"Comment\0\0" + _zeros(200 << 20)))


def _saved(file_format: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, file_format)
    return file.getvalue()


def _jpeg_claim(sandbox: Sandbox) -> bytes:
    content = bytearray(_saved("JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(content)


# What is left out of the pixels of this one nobody asks for, so that it is an image like any other.
READ = {"a PNG whose pixels go on for 200 MB", "a link to a folder above"}

IMAGES: dict[str, Maker] = {
    "a PNG of 100 bytes that claims 65535 × 65535": _image(lambda sandbox: _png(65535, 65535, zlib.compress(b""))),
    "a PNG that claims 2³¹ pixels a side": _image(lambda sandbox: _png(2**31 - 1, 2**31 - 1, zlib.compress(b""))),
    "a PNG that claims 9000 × 9000 and holds nothing": _image(lambda sandbox: _png(9000, 9000, zlib.compress(b""), mode=6)),
    "a PNG of 9400 × 9400 clear pixels in 300 KB": _image(lambda sandbox: _png(9400, 9400, _zeros(338 << 20), mode=6)),
    "a PNG whose pixels go on for 200 MB": _image(lambda sandbox: _png(8, 9, _zeros(200 << 20)[:100_000])),
    "a PNG with 200 MB of text": _image(_text_bomb),
    "a PNG with a colour profile of 200 MB": _image(
        lambda sandbox: _png(8, 8, zlib.compress(b""), (b"iCCP", b"p\0\0" + _zeros(200 << 20)))
    ),
    "a GIF that claims 65535 × 65535": _image(
        lambda sandbox: b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\0;", "0.gif"
    ),
    "a BMP that claims 60000 × 60000": _image(
        lambda sandbox: b"BM" + struct.pack("<IHHIIiiHHIIiiII", 200, 0, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0), "0.bmp"
    ),
    "a JPEG that claims 65500 × 65500": _image(_jpeg_claim, "0.jpg"),
    "PostScript that would start ghostscript": _image(
        lambda sandbox: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch ran) (w) file\n"
    ),
    "a page of HTML": _image(lambda sandbox: b"<html><script>alert(1)</script></html>"),
    "a pickle": _image(lambda sandbox: pickle.dumps(Gadget(os.mkdir, str(sandbox.trace)))),
    "a named pipe": _special("images/a/0.png", os.mkfifo),
    "a link to /dev/zero": _special("images/a/0.png", lambda path: path.symlink_to("/dev/zero")),
    "a link to a folder above": _special("images/a/0.png", lambda path: path.symlink_to("..")),
}


def png(header: bytes, pixels: bytes, *further: tuple[bytes, bytes]) -> bytes:
    """A PNG of these contents of IHDR and IDAT, with further chunks between them."""
    chunks = [(b"IHDR", header), *further, (b"IDAT", pixels), (b"IEND", b"")]
    packed = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
