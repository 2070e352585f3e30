"""Decode image files to uint8 arrays. Decoding processes import this module, so it imports no torch."""

from __future__ import annotations

import io
import math
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
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from cifar_lit.data.formats import HAS_HEIF, HEIC_SUFFIXES, IMAGES
from cifar_lit.data.progress import note_once
from cifar_lit.errors import Failure
from cifar_lit.files import read_bytes
from cifar_lit.signals import ignore_stop_signals, start_resource_tracker
from cifar_lit.text import printable
from cifar_lit.threads import free_cores

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
KINDS = f"JPEG, PNG, WebP, BMP, GIF, TIFF, PPM{', AVIF or HEIC' if HAS_HEIF else ' or AVIF'}"
HEIC_REMEDY = 'pip install "cifar-lit[photos]", or convert it: magick mogrify -format jpg *.heic'
DEEP_SUFFIXES = (".png", ".tif", ".tiff", ".pgm", ".pnm")  # formats with 16-bit grey
MIN_DEEP_COLOUR = 16  # smallest maximum of the upper bytes of a picture with 16-bit colours
MAX_MEASURED = 300  # images, to find the levels of all
FEW_GREYS = 16  # number of 256 below which a note names the levels that give most images more
UNREAD_SUFFIXES = (*HEIC_SUFFIXES, ".jp2", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".psd", ".tga", ".svg", ".pdf")
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
MAX_WEBP_BYTES = 4 * MAX_WEBP_PIXELS  # libwebp keeps a record of each chunk, also of empty ones
MAX_SLOW = 1 << 22  # pixels of a PPM whose values Pillow converts in Python
MAX_TAG_BYTES = 1 << 21  # in a TIFF
MAX_TILES = 20_000  # TIFF tiles or strips
READ_COST = 1_000  # bytes that each read of a file counts in addition
MAX_SURPLUS = 10_000 * READ_COST  # bytes that may be read in addition to twice the file
# A segment with a length, or the end of the image. C8 and F0 to FD have no length in Pillow, and libjpeg refuses them.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xc8\xd0-\xd8\xf0-\xfd\xff]")
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
SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|BM|GIF8[79]a|II[*+]\0|MM\0[*+]|P[1-6f]\s|RIFF....WEBP|....ftyp(?:avi|he|mif|msf)",
    re.DOTALL,
)  # how files of `KINDS` begin
_TIFF_COMPRESSION, _TILE_WIDTH, _TILE_HEIGHT = 259, 322, 323  # tags
_TIFF_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946)  # none, fax, LZW, JPEG, Deflate and PackBits
_CONVERTED_FIRST = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA", "HSV": "RGB", "YCbCr": "RGB", "CMYK": "RGB", "LAB": "RGB"}

T = TypeVar("T")
Levels = tuple[int, int]  # grey values that become black and white
Pixels = tuple[bytes, dict[int, str]]  # pixels of the readable files in order; reasons of the unreadable by position


class Preparation(NamedTuple):
    """Format of decoded images."""

    size: tuple[int, int]  # (H, W)
    channels: int = 3  # 3 for RGB, 1 for grey
    resize: str = "crop"  # one of `RESIZES`
    # Values of 16-bit grey images that become black and white; None for 0 and 65535.
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
        channels, resize, levels: see `Preparation`.

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


def pixels_of(image: Image.Image, preparation: Preparation) -> np.ndarray:
    """Return a PIL image of any mode as uint8 (H, W, channels), by the same steps as `decode`.

    Pixels of mode F must be in 0 … 1. Raise DecodeError for others, and if the image's file cannot be read.
    """
    with _decode_errors(getattr(image, "filename", "") or "the picture"):
        image.load()
        return _upright(image, *preparation)


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


def level_sample(paths: Sequence[str]) -> Sequence[str]:
    """Return the at most `MAX_MEASURED` files that `common_levels` reads."""
    paths = [path for path in paths if path.lower().endswith(DEEP_SUFFIXES)]
    return paths[:: max(1, math.ceil(len(paths) / MAX_MEASURED))]


def common_levels(paths: Sequence[str]) -> Levels | None:
    """Return the levels of the 16-bit grey images among files, measured on their `level_sample`.

    In each image, the lowest and highest thousandth may be dead pixels. Of the images, the 2 % with the lowest and
    highest values may be blank. Images that use most of the 65,536 values keep them all (None). A note reports images
    that become almost plain, because others have far darker or brighter pixels.
    """
    lows: list[int] = []
    highs: list[int] = []
    darks: list[int] = []
    brights: list[int] = []
    for path in level_sample(paths):
        with suppress(DecodeError), _decode_errors(path):
            image = _open(_read(path))
            if image.mode.startswith("I") and image.width * image.height <= MAX_UNPACKED_PIXELS:
                with silent_stderr():
                    values = np.asarray(image)
                for percent, lowest, highest in ((0.1, lows, highs), (5.0, darks, brights)):
                    lowest.append(int(np.percentile(values, percent, method="lower")))
                    highest.append(int(np.percentile(values, 100 - percent, method="higher")))
    if not lows:
        return None
    low = int(np.percentile(lows, 2, method="lower"))
    high = int(np.percentile(highs, 98, method="higher"))
    is_full = low >= 0 and high <= 65535 and high - low >= 32768
    dark, bright = int(np.median(darks)), int(np.median(brights))
    if 0 < 256 * (bright - dark) < FEW_GREYS * (65536 if is_full else high - low):
        fault = f"most values of most 16-bit images lie between {dark:,} and {bright:,}, others far outside"
        note_once(f'{fault}: if those are faults, --data.levels "[{dark}, {bright}]" keeps more grey levels')
    return None if is_full or low >= high else (low, high)


def decode_chunks(
    chunks: Iterable[Sequence[str]], preparation: Preparation, all_cores: bool, all_of_size: bool = False
) -> Iterator[Pixels]:
    """Yield the result of `decode_files` for each chunk of paths, in order. `all_cores`: a process per free core."""
    work = partial(decode_files, preparation=preparation, all_of_size=all_of_size)
    cores = free_cores() if all_cores else 1
    if cores == 1:
        yield from map(work, chunks)
        return
    workers = min(cores, 32)
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


def submit_without_main(pool: ProcessPoolExecutor, function: Callable[..., T], *args: object) -> Future[T]:
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
    suffixes = (os.path.splitext(name)[1].lower() for name in names)  # noqa: PTH122
    counts = Counter(suffix for suffix in suffixes if suffix in UNREAD_SUFFIXES and suffix not in IMAGES)
    if not counts:
        return ""
    found = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())
    suffix, _ = counts.most_common(1)[0]
    extra = 'pip install "cifar-lit[photos]", or ' if suffix in HEIC_SUFFIXES else ""
    return f" {found}: {extra}convert them: magick mogrify -format jpg '*{suffix}'"


class _Reader(io.BytesIO):
    """An image file that can be read about twice, in few steps.

    Pillow reads a crafted file byte by byte, in empty chunks, or again for each of its tags.
    """

    def __init__(self, data: bytes, limit: int) -> None:
        super().__init__(data)
        self.left = limit

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.left -= len(data) + READ_COST
        self.check()
        return data

    def check(self) -> None:
        """Raise OSError if too much was read. Pillow drops this error while it reads tags."""
        if self.left < 0:
            raise OSError("too many parts for an image, or too much beside its pixels: save it again")


def _read(source: str | Path | BinaryIO) -> bytes:
    return read_bytes(source, MAX_FILE_BYTES) if isinstance(source, str | Path) else source.read()


def _open(data: bytes) -> ImageFile.ImageFile:
    """Open an image without unpacking it. Raise OSError for other formats, and for files crafted to take long."""
    if not data:
        raise OSError("the file is empty")
    formats: tuple[str, ...] = FORMATS
    # AVIF has the same container, and Pillow reads it.
    if data[4:8] == b"ftyp" and data[8:10] in (b"he", b"mi", b"ms") and b"avif" not in data[8:64]:
        if not HAS_HEIF:
            raise OSError(f"it is a HEIC: {HEIC_REMEDY}")
        pi_heif = import_module("pi_heif")
        pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
        formats = ("HEIF",)
    if data.startswith(b"RIFF") and len(data) > MAX_WEBP_BYTES:
        raise OSError(f"a WebP of more than {MAX_WEBP_BYTES:,} bytes: save it smaller")
    scans = _count_scans(data) if data.startswith(b"\xff\xd8") else 1
    limit = 2 * len(data) + MAX_SURPLUS
    is_tiff = data.startswith((b"II", b"MM"))
    file = _Reader(data, MAX_TAG_BYTES if is_tiff else limit)
    try:
        image = Image.open(file, formats=formats)
    except UnidentifiedImageError:
        file.check()
        if is_tiff or data[4:8] == b"ftyp":
            raise OSError("damaged or cut short") from None
        raise
    file.left = limit
    _check_cost(image, scans)
    return image


def _check_cost(image: ImageFile.ImageFile, scans: int) -> None:
    """Raise OSError for an image that would take much more time or memory than its pixels."""
    pixels = image.width * image.height
    if image.format == "PPM" and image.tile[0][0] != "raw" and pixels > MAX_SLOW:
        raise OSError(f"a PPM of text or unusual values with more than {MAX_SLOW:,} pixels: save it as PNG")
    if scans > 1 and (pixels > MAX_BUFFERED_PIXELS or scans * pixels > MAX_SCANNED_PIXELS):
        raise OSError(f"{scans} scans of {pixels:,} pixels: save it as a baseline JPEG, or smaller")
    if image.format == "BMP" and image.info.get("compression") in (1, 2):  # Pillow unpacks it byte by byte
        raise OSError("a run-length encoded BMP: save it as PNG")
    if isinstance(image, TiffImageFile):
        tags = image.tag_v2
        if tags.get(_TIFF_COMPRESSION, 1) not in _TIFF_COMPRESSIONS:
            raise OSError("a TIFF of a rare compression: save it as PNG")
        if len(image.tile) > MAX_TILES or tags.get(_TILE_WIDTH, 1) * tags.get(_TILE_HEIGHT, 1) > MAX_UNPACKED_PIXELS:
            raise OSError("a TIFF of many or huge tiles: save it again")


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


def _count_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG. Raise OSError if it is cut, or has too many scans or segments."""
    offset, segments, scans = 2, 0, 0
    while True:
        match = _JPEG_MARKER.search(data, offset)
        if match is None:
            raise OSError("cut short")
        if match[0] == b"\xff\xd9":  # may not be last: phones append a video
            return scans
        offset = match.end() + max(int.from_bytes(data[match.end() : match.end() + 2], "big"), 2)
        segments += 1
        scans += match[0] == b"\xff\xda"
        if scans > MAX_SCANS or segments > MAX_SEGMENTS:
            limit = f"{MAX_SCANS} scans" if scans > MAX_SCANS else f"{MAX_SEGMENTS} segments"
            raise OSError(f"more than {limit}: save it as a baseline JPEG")


def _check_complete(data: bytes, file_format: str | None) -> None:
    """Raise OSError if the end of a file was never written and holds zeros. Decoders would return grey pixels.

    Pillow itself refuses a file that is too short.
    """
    if file_format == "PNG":
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
