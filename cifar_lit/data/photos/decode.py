"""Decode image files to uint8 arrays."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from cifar_lit.base.errors import Failure, install_command
from cifar_lit.base.hardware import core_count
from cifar_lit.base.text import printable
from cifar_lit.data.settings import RESIZES, Images

HAS_HEIF = find_spec("pi_heif") is not None  # the extra `photos`
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
# Images in folders. Files with other suffixes are ignored.
IMAGES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".avif",
    *(HEIC_SUFFIXES if HAS_HEIF else ()),
)  # fmt: skip
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
KINDS = f"JPEG, PNG, WebP, BMP, GIF, TIFF, PPM{', AVIF or HEIC' if HAS_HEIF else ' or AVIF'}"
HEIC_REMEDY = f"{install_command('photos')}, or convert: magick mogrify -format jpg *.heic"
DEEP_SUFFIXES = (".png", ".tif", ".tiff", ".pgm", ".pnm")  # formats with 16-bit grey
NEARLY_WHITE = 250  # grey level
MEASURED = 300  # images, to find the levels of all
UNREAD_SUFFIXES = (*HEIC_SUFFIXES, ".jp2", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".psd", ".tga", ".svg", ".pdf")
MISSING = "missing: there is no such file"
_CONVERTED_FIRST = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA", "HSV": "RGB", "YCbCr": "RGB", "CMYK": "RGB", "LAB": "RGB"}

# Pillow warns of large images before it refuses larger ones, and of damaged EXIF and tags.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").addHandler(logging.NullHandler())  # else a TIFF that Pillow does not read prints lines

Levels = tuple[int, int]  # grey values that become black and white


class Preparation(NamedTuple):
    """Format of decoded images."""

    size: tuple[int, int] | None = None  # (H, W), to which images are scaled (bicubic, antialiased); None for their own
    channels: int = 3  # 3 for RGB, 1 for grey
    resize: str = "crop"  # one of `RESIZES`
    # Values of 16-bit grey images that become black and white; None for 0 and 65535.
    levels: Levels | None = None

    @classmethod
    def of(cls, images: Images) -> Preparation:
        """Return the format that settings ask for."""
        levels = None
        if images.levels is not None:
            levels = (images.levels[0], images.levels[1])
        return cls(images.size, images.channels or 3, images.resize, levels)

    def describe(self) -> str:
        """Return what is done to an image, for people who do it with other programs."""
        text = f"upright by EXIF, transparent parts white or grey, {RESIZES[self.resize]} (bicubic, antialiased)"
        if self.levels:
            text += f", 16-bit values from {self.levels[0]} to {self.levels[1]} scaled to 0 … 255"
        return text


class DecodeError(Failure):
    """An image that cannot be decoded. `reason` says why in a few words, without the name."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return printable(f"{self.name} cannot be read as an image: {self.reason}")


def decode(source: str | Path | BinaryIO, preparation: Preparation = Preparation()) -> np.ndarray:  # noqa: B008, immutable
    """Decode an image of one of `FORMATS` (its first frame), upright according to its EXIF orientation.

    Transparent parts become white, or grey where a white figure would vanish; 16-bit grey is scaled to 8 bits.

    source: path or open file.

    Returns:
        uint8 (H, W, channels).

    Raises:
        DecodeError: the file is not an image, damaged, truncated, or so large that Pillow refuses it.
    """
    with _decode_errors(source):
        data = Path(source).read_bytes() if isinstance(source, str | Path) else source.read()
        image = _open(data)
        _check_complete(data, image.format)
        if preparation.size is not None:
            side = 2 * max(preparation.size)
            image.draft(None, (side, side))  # a JPEG is decoded at a smaller scale, at least twice the final size
        is_deep_colour = ";16" in str(image.tile[:1]) and not image.mode.startswith("I")
        image.load()
        if is_deep_colour and np.asarray(image.convert("RGB")).max() < 16:  # Pillow keeps the upper 8 of 16 bits
            raise OSError("16-bit colours that use 12 bits or fewer: magick mogrify -evaluate multiply 16 FILES")
        return _upright(image, preparation)


def pixels_of(image: Image.Image, preparation: Preparation) -> np.ndarray:
    """Return a PIL image of any mode as uint8 (H, W, channels), by the same steps as `decode`.

    Pixels of mode F must be in 0 … 1. Raise DecodeError for others, and if the image's file cannot be read.
    """
    with _decode_errors(getattr(image, "filename", "") or "the picture"):
        image.load()
        return _upright(image, preparation)


def image_size(source: str | Path) -> tuple[int, int]:
    """Return the (H, W) that `decode` gives without `size`, from the image's header. Raise DecodeError."""
    with _decode_errors(source):
        image = _open(Path(source).read_bytes())
        turned = False
        with suppress(Exception):  # the EXIF is damaged
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return image.size if turned else image.size[::-1]


def common_levels(paths: Sequence[str]) -> Levels | None:
    """Return the levels of the 16-bit grey images among files, measured on at most `MEASURED` of them.

    In each image, the lowest and highest thousandth may be dead pixels. Of the images, the 2 % with the lowest and
    highest values may be blank. Images that use most of the 65,536 values keep them all (None).
    """
    lows: list[int] = []
    highs: list[int] = []
    paths = [path for path in paths if path.lower().endswith(DEEP_SUFFIXES)]
    for path in paths[:: max(1, math.ceil(len(paths) / MEASURED))]:
        with suppress(DecodeError), _decode_errors(path):
            image = _open(Path(path).read_bytes())
            if image.mode.startswith("I"):
                values = np.asarray(image)
                lows.append(int(np.percentile(values, 0.1, method="lower")))
                highs.append(int(np.percentile(values, 99.9, method="higher")))
    if not lows:
        return None
    low = int(np.percentile(lows, 2, method="lower"))
    high = int(np.percentile(highs, 98, method="higher"))
    if low == high:
        return None
    is_16_bit = 0 <= low < high <= 65535
    if is_16_bit and high - low >= 32768:
        return None
    return low, high


def decode_all(paths: Iterable[str], preparation: Preparation) -> Iterator[np.ndarray | DecodeError]:
    """Yield the pixels of each file, or why it is unreadable, in order. A thread per core decodes."""

    def work(path: str) -> np.ndarray | DecodeError:
        try:
            return decode(path, preparation)
        except DecodeError as error:
            return error

    cores, remaining = core_count(), iter(paths)
    with ThreadPoolExecutor(cores) as pool:
        while part := [*islice(remaining, 64 * cores)]:
            yield from pool.map(work, part)


def remedy_for(names: Iterable[str]) -> str:
    """Return a sentence about files by their suffixes, and what to do with them; empty without files."""
    counts = Counter(Path(name).suffix.lower() or "without a suffix" for name in names)
    if not counts:
        return ""
    found = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())
    remedy = "save those that are pictures as .jpg or .png"
    if not counts.keys().isdisjoint(HEIC_SUFFIXES):
        remedy = HEIC_REMEDY
    return f" {found}: {remedy}"


def _open(data: bytes) -> ImageFile.ImageFile:
    """Open an image without unpacking it."""
    formats: tuple[str, ...] = FORMATS
    # AVIF has the same container, and Pillow reads it.
    if data[4:8] == b"ftyp" and data[8:10] in (b"he", b"mi", b"ms") and b"avif" not in data[8:64]:
        if not HAS_HEIF:
            raise OSError(f"it is a HEIC: {HEIC_REMEDY}")
        pi_heif = import_module("pi_heif")
        pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
        formats = ("HEIF",)
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        if data.startswith(b"version https://git-lfs"):
            raise OSError("a pointer of Git LFS, the image is not here: git lfs pull") from None
        raise


def _check_complete(data: bytes, file_format: str | None) -> None:
    """Raise OSError if the end of a file was never written and holds zeros. Decoders would return grey pixels.

    Pillow itself refuses a file that is too short. Zeros after the end of a JPEG or PNG are padding.
    """
    is_cut = False
    if file_format == "PNG":
        is_cut = b"IEND" not in data
    elif file_format in ("JPEG", "MPO", "WEBP", "AVIF", "HEIF"):
        is_cut = data.endswith(bytes(32))
    if file_format in ("JPEG", "MPO") and data.rstrip(b"\0").endswith(b"\xff\xd9"):
        is_cut = False
    if is_cut:
        raise OSError("cut short")


def _upright(image: Image.Image, preparation: Preparation) -> np.ndarray:
    """Return a loaded image as uint8 (H, W, channels), upright and resized by one of `RESIZES`."""
    size, channels, resize, levels = preparation
    with suppress(Exception):  # the EXIF is damaged; the pixels may be intact
        image = ImageOps.exif_transpose(image)
    image = _as_mode(image, "RGB" if channels == 3 else "L", levels)
    height, width = size or image.size[::-1]
    if image.size != (width, height):
        bicubic = Image.Resampling.BICUBIC
        if resize == "crop":
            image = ImageOps.fit(image, (width, height), bicubic)
        elif resize == "letterbox":
            # After normalisation, grey is close to the zeros that convolutions pad with. Black would add edges.
            image = ImageOps.pad(image, (width, height), bicubic, color="grey")
        else:
            image = image.resize((width, height), bicubic)
    return np.array(image).reshape(height, width, channels)


def _as_mode(image: Image.Image, mode: str, levels: Levels | None) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; convert() would clip it at 255
        low, high = levels or (0, 65535)
        grey = np.clip(np.array(image).astype(np.float32), low, high) - low
        image = Image.fromarray((grey * (255 / (high - low)) + 0.5).astype(np.uint8))
    elif image.mode == "F":
        grey = np.array(image)
        if not (grey.min() >= 0 and grey.max() <= 1):  # also for NaN
            raise ValueError("floating pixels must lie in 0 … 1: scale them, or save them with 16 bits")
        image = Image.fromarray((grey * 255).round().astype(np.uint8))
    elif image.mode in _CONVERTED_FIRST:
        image = image.convert(_CONVERTED_FIRST[image.mode])
    if image.has_transparency_data:
        figure = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", figure.size, "white"), figure)
        if np.asarray(image.convert("L")).min() > NEARLY_WHITE:
            image = Image.alpha_composite(Image.new("RGBA", figure.size, "grey"), figure)
    return image if image.mode == mode else image.convert(mode)


@contextmanager
def _decode_errors(source: object) -> Iterator[None]:
    """Convert every error into a DecodeError for `source`. Pillow does not document all that it raises."""
    name = str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "the image"))
    try:
        yield
    except FileNotFoundError:
        raise DecodeError(name, MISSING) from None
    except UnidentifiedImageError:
        raise DecodeError(name, f"not a {KINDS} that can be read, or its beginning is damaged") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        if "truncated" in reason.lower():
            reason = "cut short"
        raise DecodeError(name, reason) from error
