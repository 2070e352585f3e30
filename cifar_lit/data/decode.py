"""Decode image files to uint8 arrays. Decoding processes import this module, so it imports no torch."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from cifar_lit.data.progress import note_once
from cifar_lit.errors import Failure
from cifar_lit.files import file_size, read_bytes
from cifar_lit.signals import ignore_stop_signals, start_resource_tracker
from cifar_lit.text import printable
from cifar_lit.threads import free_cores

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
HAS_HEIF = find_spec("pi_heif") is not None  # the extra `photos`
KINDS = f"JPEG, PNG, WebP, BMP, GIF, TIFF, PPM{', AVIF or HEIC' if HAS_HEIF else ' or AVIF'}"
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
HEIC_REMEDY = 'pip install "cifar-lit[photos]", or convert it: magick mogrify -format jpg *.heic'
# Images in folders. Files with other suffixes are ignored.
SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".avif",
    *(HEIC_SUFFIXES if HAS_HEIF else ()),
)  # fmt: skip
DEEP_SUFFIXES = (".png", ".tif", ".tiff", ".pgm", ".pnm")  # formats with 16-bit grey
MIN_DEEP_COLOUR = 16  # smallest maximum of the upper bytes of a picture with 16-bit colours
MAX_MEASURED = 300  # images, to find the levels of all
FEW_GREYS = 16  # of 256; if most images have fewer, a note names the levels that give them more
UNREAD_SUFFIXES = (  # images that are not read, but can be converted
    *(() if HAS_HEIF else HEIC_SUFFIXES), ".jp2", ".j2k", ".jpx", ".jxl", ".jxr", ".dng", ".cr2", ".cr3", ".nef",
    ".arw", ".orf", ".raf", ".rw2", ".psd", ".tga", ".pcx", ".svg", ".eps", ".pdf", ".exr", ".hdr", ".dcm", ".ico",
)  # fmt: skip
MISSING = "missing: there is no such file"
MAX_FILE_BYTES = 1 << 29  # more than a BMP of the largest size that Pillow accepts
MAX_UNPACKED_PIXELS = 1 << 25  # unpacked at once, at up to 12 bytes each; a large JPEG is unpacked at a smaller scale
# Pillow unpacks WebP, also a still image, through two frames of an animation: 22 bytes per pixel.
MAX_WEBP_PIXELS = MAX_UNPACKED_PIXELS // 2
# A JPEG with several scans is held in memory at 6 bytes per pixel or more, and each scan passes over all pixels.
MAX_SCANS = 100  # encoders write about 10
MAX_SCANNED_PIXELS = 1 << 31  # scans × pixels
MAX_BUFFERED_PIXELS = 1 << 26
MAX_SEGMENTS = 400  # in a JPEG, at most 64 KiB each; Pillow's time for EXIF grows with the square of their number
MAX_PARTS = 10_000  # chunks of a PNG or WebP, or blocks before a GIF's image, plus one per 1,000 bytes
MAX_RLE = 1 << 22  # pixels plus bytes of a run-length encoded BMP, which Pillow unpacks in Python
MAX_SLOW = 1 << 22  # pixels of a PPM whose values Pillow converts in Python
MAX_PPM_HEADER = 4096  # bytes, which Pillow reads one at a time
MAX_TAGS = 1_000  # TIFF tags, in all of its directories
MAX_TILES = 20_000  # TIFF tiles or strips
MAX_FILL = 10_000  # bytes between the segments before a JPEG's first scan, which Pillow reads one at a time
# A segment with a length, or the end of the image. C8 and F0 to FD have no length in Pillow, and libjpeg refuses them.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xc8\xd0-\xd8\xf0-\xfd\xff]")
_OTHER_FORMATS = {  # unsupported image formats, by their bytes from the first or the fifth on
    b"%PDF": "a PDF", b"8BPS": "a Photoshop file", b"\0\0\1\0": "an icon", b"jP  \r\n\x87\n": "a JPEG 2000",
    b"\xff\x0a": "a JPEG XL", b"JXL \r\n\x87\n": "a JPEG XL",
}  # fmt: skip
RESIZES = {  # ways to resize an image of another aspect ratio
    "crop": "scaled to cover the size, then cropped to its centre",
    "letterbox": "scaled to fit into the size, with grey (128) borders",
    "squash": "scaled to the size, ignoring the aspect ratio",
}
_PLAIN_REASONS = {  # by a part of Pillow's message
    "truncated": "cut short",
    "decoder object": "damaged or cut short",
    "decoder error": "damaged or cut short",
    "max_text": "more packed text than belongs to an image",
}
_UPRIGHT = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_SIGNATURES = (  # JPEG, PNG, BMP, GIF and TIFF
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+",
)  # fmt: skip
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"hevm", b"mif1", b"msf1")
# Width and height, and for all but bitmaps (P1 and P4) the value of white, each after blanks and comments.
_PPM_HEADER = re.compile(rb"P(?:[14](?:{blank}[0-9]+){2}|[2356f](?:{blank}[-+.0-9]+){3})\s".replace(
    b"{blank}", rb"(?:\s|#[^\r\n]*[\r\n])+"))  # fmt: skip
_TIFF_SIZES = (1, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 2, 8, 8, 8, 8)  # bytes of a value, by its type
_TIFF_DIRECTORIES = (34665, 34853, 40965)  # tags of EXIF, GPS and Interoperability, which Pillow reads too
_TIFF_COMPRESSION, _TIFF_OFFSETS, _TIFF_TILE_SIDES = 259, (273, 324), (322, 323)  # other tags
_TIFF_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946)  # none, fax, LZW, JPEG, Deflate and PackBits
_CONVERTED_FIRST = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA", "HSV": "RGB", "YCbCr": "RGB", "CMYK": "RGB", "LAB": "RGB"}

T = TypeVar("T")
Levels = tuple[int, int]  # grey values that become black and white


Pixels = tuple[bytes, dict[int, str]]  # pixels of the readable files in order; reasons of the unreadable by position


class Preparation(NamedTuple):
    """Format of decoded images.

    size: (H, W).
    channels: 3 for RGB, 1 for grey.
    resize: one of `RESIZES`.
    levels: values of 16-bit grey images that become black and white; None for 0 and 65535.
    """

    size: tuple[int, int]
    channels: int = 3
    resize: str = "crop"
    levels: Levels | None = None


class DecodeError(Failure):
    """An image that cannot be decoded. `reason` says why in a few words, without the name."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return printable(f"{self.name} cannot be read as an image: {self.reason}")


class SizesDiffer(ValueError):
    """An image does not have the size that was expected of all images."""


def decode(
    source: str | Path | BinaryIO,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    resize: str = "crop",
    levels: Levels | None = None,
) -> np.ndarray:
    """Decode an image of one of `FORMATS` (its first frame), upright according to its EXIF orientation.

    Transparent parts become white; 16-bit grey is scaled to 8 bits.

    Args:
        source: path or open file.
        size: (H, W) to scale to (bicubic, antialiased); None for the image's own size.
        channels: 3 for RGB, 1 for grey.
        resize: one of `RESIZES`.
        levels: see `Preparation`.

    Returns:
        uint8 (H, W, channels).

    Raises:
        DecodeError: the file is not an image, damaged, truncated, or larger than `pixel_limit`.
    """
    with _decode_errors(source):
        data = _read(source)
        image = _open(data)
        _check_complete(data, image.format)
        if size is not None and image.format in ("JPEG", "MPO"):
            width, height = _scaled_size(size[::-1], image.size, resize, turned=_orientation(image) >= 5)
            image.draft(None, (2 * width, 2 * height))  # decode at a smaller scale, at least twice the final size
        limit = MAX_WEBP_PIXELS if image.format == "WEBP" else MAX_UNPACKED_PIXELS
        if image.width * image.height > limit:
            raise OSError(f"more than {limit:,} pixels to unpack: save it smaller")
        is_deep_colour = not image.mode.startswith("I") and ";16" in str(image.tile[:1])
        with silent_stderr() if image.format == "TIFF" else nullcontext():  # libtiff prints its errors
            image.load()
        # Pillow keeps the upper 8 of 16 bits of colours.
        if is_deep_colour and np.asarray(image.convert("RGB")).max() < MIN_DEEP_COLOUR:
            raise OSError("16-bit colours that use 12 bits or fewer: magick mogrify -evaluate multiply 16 FILES")
        return _upright(image, size, channels, resize, levels)


def pixels_of(
    image: Image.Image,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    resize: str = "crop",
    levels: Levels | None = None,
) -> np.ndarray:
    """Return a PIL image of any mode as uint8 (H, W, channels), by the same steps as `decode`.

    Pixels of mode F must be in 0 … 1. Raise DecodeError for others, and if the image's file cannot be read.
    """
    with _decode_errors(getattr(image, "filename", "") or "the picture"):
        image.load()
        return _upright(image, size, channels, resize, levels)


@contextmanager
def pixel_limit(pixels: int) -> Iterator[None]:
    """Limit the pixels of decoded images within the context, also in decoding processes that are started in it."""
    previous = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = previous


def image_size(source: str | Path | BinaryIO) -> tuple[int, int]:
    """Return the (H, W) that `decode` gives without `size`, from the image's header. Raise DecodeError."""
    with _decode_errors(source):
        image = _open(_read(source))
        width, height = image.size
        return (width, height) if _orientation(image) >= 5 else (height, width)


def decode_files(paths: Sequence[str], preparation: Preparation, all_of_size: bool = False) -> Pixels:
    """Decode many files. With `all_of_size`, nothing is resized, and an image of another size raises SizesDiffer."""
    pixels: list[bytes] = []
    bad: dict[int, str] = {}
    size, channels, resize, levels = preparation
    for position, path in enumerate(paths):
        try:
            image = decode(path, None if all_of_size else size, channels, resize, levels)
        except DecodeError as error:
            bad[position] = error.reason
            continue
        if image.shape[:2] != size:
            raise SizesDiffer(path)
        pixels.append(image.tobytes())
    return b"".join(pixels), bad


def common_levels(paths: Sequence[str]) -> Levels | None:
    """Return the levels of the 16-bit grey images among files, measured on at most `MAX_MEASURED` of them.

    In each image, the lowest and highest thousandth may be dead pixels. Of the images, the 2 % with the lowest and
    highest values may be blank. Images that use most of the 65,536 values keep them all (None). A note reports images
    that become almost plain, because others have far darker or brighter pixels.
    """
    paths = [path for path in paths if path.lower().endswith(DEEP_SUFFIXES)]
    lows, highs, darks, brights = [], [], [], []
    for path in paths[:: len(paths) // MAX_MEASURED + 1]:
        with suppress(DecodeError), _decode_errors(path):
            file_size(path)  # raises an error for pipes
            with open(path, "rb") as file:  # noqa: PTH123
                head = file.read(26)
            if head.startswith(b"\x89PNG") and head[24:26] != b"\x10\0":  # 16 bits, grey
                continue
            image = _open(_read(path))
            if image.mode.startswith("I") and image.width * image.height <= MAX_UNPACKED_PIXELS:
                with silent_stderr():
                    values = np.array(image).ravel()
                for cut, lowest, highest in ((len(values) // 1000, lows, highs), (len(values) // 20, darks, brights)):
                    values.partition((cut, len(values) - 1 - cut))
                    lowest.append(int(values[cut]))
                    highest.append(int(values[-1 - cut]))
    if not lows:
        return None
    cut = len(lows) // 50
    low, high = sorted(lows)[cut], sorted(highs)[-1 - cut]
    is_full = low >= 0 and high <= 65535 and high - low >= 32768
    dark, bright = sorted(darks)[len(darks) // 2], sorted(brights)[len(brights) // 2]
    if 0 < 256 * (bright - dark) < FEW_GREYS * (65536 if is_full else high - low):
        fault = f"most values of most 16-bit images lie between {dark:,} and {bright:,}, others far outside"
        note_once(f'{fault}: if those are faults, --data.levels "[{dark}, {bright}]" keeps more grey levels')
    return None if is_full or low >= high else (low, high)


def decode_chunks(
    chunks: Sequence[Sequence[str]], preparation: Preparation, all_cores: bool, all_of_size: bool = False
) -> Iterator[Pixels]:
    """Yield the result of `decode_files` for each chunk of paths, in order. `all_cores`: a process per free core."""
    work = partial(decode_files, preparation=preparation, all_of_size=all_of_size)
    cores = free_cores() if all_cores else 1
    if cores == 1:
        yield from map(work, chunks)
        return
    workers = min(cores, len(chunks), 32)
    start_resource_tracker()
    limit = Image.MAX_IMAGE_PIXELS
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=start_worker, initargs=(limit,))
    ahead: deque[Future[Pixels]] = deque()
    try:
        for chunk in chunks:
            ahead.append(submit_without_main(pool, work, chunk))
            if len(ahead) > 4 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def submit_without_main(pool: ProcessPoolExecutor, function: Callable[..., T], *args: Any) -> Future[T]:
    """Submit a call with `__main__` hidden. Otherwise a spawned process would import the main script, and torch."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return pool.submit(function, *args)
    finally:
        sys.modules["__main__"] = main


def start_worker(pixel_limit: int | None) -> None:
    """Set up a decoding process with the parent's pixel limit. It ignores Ctrl-C, and ends when the parent ends."""
    Image.MAX_IMAGE_PIXELS = pixel_limit
    ignore_stop_signals(but={signal.SIGTERM})  # the parent ends its workers with it
    parent = parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)  # a killed parent would otherwise leave its workers waiting forever

        threading.Thread(target=end_with_parent, daemon=True).start()


def remedy_for(names: Iterable[str]) -> str:
    """Return a sentence about files that can be converted, by their suffixes; empty if there are none."""
    counts = Counter(os.path.splitext(name)[1].lower() for name in names)  # noqa: PTH122
    found = [(count, suffix) for suffix, count in counts.most_common() if suffix in UNREAD_SUFFIXES]
    if not found:
        return f" {counts['']:,} without a suffix: rename them, such as 1.jpg" if counts[""] else ""
    what = ", ".join(f"{count:,} {suffix}" for count, suffix in found)
    command = f"magick mogrify -format jpg '*{found[0][1]}'"
    if found[0][1] in HEIC_SUFFIXES:
        return f' {what}: pip install "cifar-lit[photos]" to read them, or convert them: {command}'
    return f" {what}: convert them first, such as with {command}"


def _read(source: str | Path | BinaryIO) -> bytes:
    return read_bytes(source, MAX_FILE_BYTES) if isinstance(source, str | Path) else source.read()


def _open(data: bytes) -> ImageFile.ImageFile:
    """Open an image without unpacking it. Raise OSError for other formats, and for files crafted to take long."""
    if not data:
        raise OSError("the file is empty")
    for signature, kind in _OTHER_FORMATS.items():
        if data.startswith(signature) or data.startswith(signature, 4):
            raise OSError(f"it is {kind}: save it as JPEG or PNG")
    formats: tuple[str, ...] = FORMATS
    if _is_heif(data):
        if not _register_heif():
            raise OSError(f"it is a HEIC: {HEIC_REMEDY}")
        formats = ("HEIF",)
    if data[:2] in (b"II", b"MM"):
        _check_tiff(data)
    if re.match(rb"P[0-9fFy]", data) and not _PPM_HEADER.match(data[:MAX_PPM_HEADER]):
        raise OSError("a PPM with a long or damaged header: save it again")
    scans = _count_scans(data) if data.startswith(b"\xff\xd8") else 1
    if next(islice(_parts(data), MAX_PARTS + len(data) // 1000, None), None) is not None:
        raise OSError("too many parts for an image: save it again")
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        if data[:4] in (b"II*\0", b"MM\0*") or data[4:8] == b"ftyp":
            raise OSError("damaged or cut short") from None
        raise
    pixels = image.width * image.height
    if image.format == "PPM" and image.tile[0][0] != "raw" and pixels > MAX_SLOW:
        raise OSError(f"a PPM of text or unusual values with more than {MAX_SLOW:,} pixels: save it as PNG")
    if scans > 1 and (pixels > MAX_BUFFERED_PIXELS or scans * pixels > MAX_SCANNED_PIXELS):
        raise OSError(f"{scans} scans of {pixels:,} pixels: save it as a baseline JPEG, or smaller")
    if image.format == "BMP" and image.info.get("compression") in (1, 2) and pixels + len(data) > MAX_RLE:
        raise OSError("a large run-length encoded BMP: save it as PNG")
    return image


def has_known_signature(data: bytes) -> bool:
    """Return whether data begin like an image of one of `KINDS`."""
    is_webp = data.startswith(b"RIFF") and data[8:12] == b"WEBP"
    is_avif = data[4:8] == b"ftyp" and b"avif" in data[8:64]
    return data.startswith(_SIGNATURES) or is_webp or is_avif or _is_heif(data) or bool(re.match(rb"P[1-6f]\s", data))


def _is_heif(data: bytes) -> bool:
    """Return whether data are a HEIC. AVIF has the same container, and Pillow reads it."""
    return data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS and b"avif" not in data[8:64]


def _register_heif() -> bool:
    """Let Pillow open HEIC files. Return whether the extra `photos` is installed."""
    if HAS_HEIF:
        pi_heif = import_module("pi_heif")
        pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
    return HAS_HEIF


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Suppress what C code prints to standard error."""
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _check_tiff(data: bytes) -> None:
    """Raise OSError for a TIFF that would take much more memory than its pixels.

    Pillow reads all values of a directory. 65,535 tags could each claim the whole file. Rare compressions ask for a
    memory of their own.
    """
    order: Literal["little", "big"] = "little" if data[:2] == b"II" else "big"
    big = data[2:4] in (b"+\0", b"\0+")  # BigTIFF
    wide, count_bytes, entry_bytes = (8, 8, 20) if big else (4, 2, 12)

    def number(offset: int, length: int) -> int:
        return int.from_bytes(data[offset : offset + length], order)

    offsets = [number(8 if big else 4, wide)]
    tags = claimed = 0
    tile_pixels = 1
    while offsets:
        offset = offsets.pop()
        count = number(offset, count_bytes)
        tags += count
        if tags > MAX_TAGS:
            raise OSError(f"more than {MAX_TAGS:,} tags in a TIFF: save it again")
        for start in range(offset + count_bytes, offset + count_bytes + count * entry_bytes, entry_bytes):
            tag, kind, values = number(start, 2), number(start + 2, 2), number(start + 4, wide)
            length = _TIFF_SIZES[kind] if kind < len(_TIFF_SIZES) else 0
            claimed += values * length
            value = number(start + 4 + wide, length)
            if tag in _TIFF_DIRECTORIES:
                offsets.append(value)
            elif tag == _TIFF_COMPRESSION and value not in _TIFF_COMPRESSIONS:
                raise OSError("a TIFF of a rare compression: save it as PNG")
            elif tag in _TIFF_OFFSETS and values > MAX_TILES:
                raise OSError(f"more than {MAX_TILES:,} tiles: save it again")
            elif tag in _TIFF_TILE_SIDES:
                tile_pixels *= value
        if claimed > len(data) + MAX_TAGS or tile_pixels > MAX_UNPACKED_PIXELS:
            raise OSError("a TIFF that claims more than it holds: save it again")


def _count_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG. Raise OSError for more scans, segments or fill bytes than a photo has."""
    offset, segments, scans, fill = 2, 0, 0, 0
    while True:
        match = _JPEG_MARKER.search(data, offset)
        if not scans:
            fill += (match.start() if match else len(data)) - offset
        if fill > MAX_FILL:
            raise OSError(f"more than {MAX_FILL:,} bytes between the segments of a JPEG: save it again")
        if match is None or match[0] == b"\xff\xd9":
            return scans
        offset = match.end() + max(int.from_bytes(data[match.end() : match.end() + 2], "big"), 2)
        segments += 1
        scans += match[0] == b"\xff\xda"
        if scans > MAX_SCANS or segments > MAX_SEGMENTS:
            limit = f"{MAX_SCANS} scans" if scans > MAX_SCANS else f"{MAX_SEGMENTS} segments"
            raise OSError(f"more than {limit}: save it as a baseline JPEG")


def _parts(data: bytes) -> Iterator[int]:
    """Yield the offset of each chunk of a PNG or WebP, or of each block before the image of a GIF."""
    if data.startswith(b"\x89PNG"):
        offset = 8
        while offset < len(data) and data[offset + 4 : offset + 8] != b"IEND":
            yield offset
            offset += 12 + int.from_bytes(data[offset : offset + 4], "big")
    elif data.startswith(b"RIFF"):
        offset = 12
        end = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
        while offset < end:
            yield offset
            length = int.from_bytes(data[offset + 4 : offset + 8], "little")
            offset += 8 + length + length % 2
    elif data.startswith(b"GIF8") and len(data) > 13:
        offset = 13 + (3 << (data[10] % 8 + 1) if data[10] >= 128 else 0)  # after the palette
        in_extension = False
        while offset < len(data) and (in_extension or data[offset] not in b",;"):
            yield offset
            if in_extension:
                in_extension = data[offset] > 0
                offset += 1 + data[offset]
            else:  # Pillow skips unknown bytes
                in_extension = data[offset : offset + 1] == b"!"
                offset += 1 + in_extension


def _check_complete(data: bytes, file_format: str | None) -> None:
    """Raise OSError if the end of a file was never written and holds zeros. Decoders would return grey pixels.

    Pillow itself refuses a file that is too short.
    """
    if file_format in ("JPEG", "MPO"):
        offset = 2  # skip the segments before the first scan, because an embedded preview has its own end marker
        while data[offset : offset + 1] == b"\xff" and data[offset + 1 : offset + 2] != b"\xda":
            length = int.from_bytes(data[offset + 2 : offset + 4], "big")
            offset += 1 if data[offset + 1 : offset + 2] == b"\xff" else 2 + length
        is_cut = data.find(b"\xff\xd9", offset) < 0  # the end marker may not be last: phones append a video
    elif file_format == "PNG":
        is_cut = b"IEND" not in data
    else:
        is_cut = file_format in ("WEBP", "AVIF", "HEIF") and data.endswith(bytes(32))
    if is_cut:
        raise OSError("cut short")


def _upright(
    image: Image.Image, size: tuple[int, int] | None, channels: int, resize: str, levels: Levels | None
) -> np.ndarray:
    """Return a loaded image as uint8 (H, W, channels), upright and resized."""
    orientation = _orientation(image)
    image = _as_mode(image, "RGB" if channels == 3 else "L", levels)
    if orientation != 1:
        image = image.transpose(_UPRIGHT[orientation])
    height, width = size or image.size[::-1]
    if image.size != (width, height):
        image = _resized(image, (width, height), resize)
    return np.array(image).reshape(height, width, channels)


def _resized(image: Image.Image, size: tuple[int, int], resize: str) -> Image.Image:
    """Return an image resized to `size` (width, height) by one of `RESIZES`."""
    width, height = size
    box = (0.0, 0.0, float(image.width), float(image.height))
    if resize == "crop":
        scale = max(width / image.width, height / image.height)
        left = max((image.width - width / scale) / 2, 0.0)
        top = max((image.height - height / scale) / 2, 0.0)
        box = (left, top, image.width - left, image.height - top)  # crop first: scaled thin images would be huge
    part = _scaled_size(size, image.size, resize)
    scaled = image.resize(part, Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    if part == size:
        return scaled
    # After normalisation, grey is close to the zeros that convolutions pad with. Black or white would add edges.
    canvas = Image.new(image.mode, size, "grey")
    canvas.paste(scaled, (round((width - part[0]) / 2), round((height - part[1]) / 2)))
    return canvas


def _scaled_size(size: tuple[int, int], image: tuple[int, int], resize: str, turned: bool = False) -> tuple[int, int]:
    """Return the (width, height) of a scaled image within `size`. turned: EXIF swaps width and height."""
    width, height = size[::-1] if turned else size
    if resize != "letterbox":
        return width, height
    if image[0] * height > image[1] * width:  # rounded like Pillow's ImageOps.contain, but at least 1
        return width, max(round(image[1] / image[0] * width), 1)
    return max(round(image[0] / image[1] * height), 1), height


def _orientation(image: Image.Image) -> int:
    if not image.info.keys() & {"exif", "xmp", "Raw profile type exif"}:
        return 1
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # the EXIF is damaged; the pixels may be intact
        return 1
    return orientation if orientation in _UPRIGHT else 1


def _as_mode(image: Image.Image, mode: str, levels: Levels | None) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; convert() would clip it at 255
        low, high = levels or (0, 65535)
        grey = np.clip(np.array(image).astype(np.float32), low, high) - low
        image = Image.fromarray((grey * (255 / (high - low)) + 0.5).astype(np.uint8))
    elif image.mode == "F":
        grey = np.array(image)
        if not (np.isfinite(grey).all() and grey.min() >= 0 and grey.max() <= 1):
            raise ValueError("floating pixels must lie in 0 … 1: scale them, or save them with 16 bits")
        image = Image.fromarray((grey * 255).round().astype(np.uint8))
    elif image.mode in _CONVERTED_FIRST:
        image = image.convert(_CONVERTED_FIRST[image.mode])
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


@contextmanager
def _decode_errors(source: object) -> Iterator[None]:
    """Convert every error into a DecodeError for `source`. Pillow does not document all that it raises."""
    name = str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "the image"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except FileNotFoundError:
        raise DecodeError(name, MISSING) from None
    except UnidentifiedImageError:
        raise DecodeError(name, f"not a {KINDS}, or its beginning is damaged") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise DecodeError(name, f"more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        plain = next((plain for part, plain in _PLAIN_REASONS.items() if part in reason.lower()), reason)
        raise DecodeError(name, plain) from error
