"""From paths to image files, from files to rows of predictions, and from rows to a contact sheet."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from cifar_lit.data.decode import (
    HEIC_SUFFIXES,
    SUFFIXES,
    DecodeError,
    decode,
    decode_chunks,
    decode_files,
    is_folder,
    walk,
)
from cifar_lit.errors import Failure
from cifar_lit.files import writing
from cifar_lit.inference.load import Classifier
from cifar_lit.runs.predictions import TOP, Row
from cifar_lit.text import natural_key, printable

# ---- From what is typed to image files: files, folders, patterns, and a list on standard input.

PATTERN = re.compile(r"[*?\[]")


class ImageFile(NamedTuple):
    """A file to classify; with an error, a path that names none."""

    path: str
    error: str | None = None


def find_images(paths: Sequence[str], stdin: BinaryIO) -> Iterator[ImageFile]:
    """The image files that some paths name, in their order; those that are not there have an error.

    Args:
        paths: each a file, whatever its suffix; a folder, for the images in it and below, known by their suffixes, in natural
            order (2.png before 10.png), without hidden ones; a pattern with *, ? or [, where ** means any depth; or - for the
            paths in `stdin`. They are kept as text that `os` understands: a name need not be UTF-8.
        stdin: paths, one a line, or with a NUL behind each.
    """
    for path in paths:
        if path == "-":
            data = stdin.read()
            lines = data.split(b"\0" if b"\0" in data else b"\n")
            literal = [os.fsdecode(line) for line in lines if line]
        elif PATTERN.search(path) and not os.path.lexists(path):
            literal = sorted(_matches(path), key=natural_key)
            if not literal:
                yield ImageFile(path, "no file fits this pattern")
        else:
            literal = [path]
        for name in literal:
            if os.path.isdir(name):
                files = _files_below(name)
                yield next(files, ImageFile(name, "the folder holds no JPEG, PNG, WebP, BMP or GIF"))
                yield from files
            else:
                yield ImageFile(name)


def _matches(pattern: str) -> set[str]:
    """Return the paths that fit a pattern; of one with **, files only. Folders below ** are visited once each, as in `walk`."""
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        return set(glob.glob(pattern))
    place = parts.index("**")
    rest = "/".join(part for part in parts[place + 1 :] if part) or "*"
    matches: set[str] = set()
    for top in glob.glob("/".join([*parts[:place], ""])) if place else ["./"]:
        folders = [top, *(f"{entry.path}/" for entry in walk(top, _visible_if_readable) if is_folder(entry))]
        folders = folders if place else [path.removeprefix("./") for path in folders]
        matches |= {match for folder in folders for match in _matches(glob.escape(folder) + rest)}
    return {match for match in matches if not os.path.isdir(match)}


def _files_below(folder: str) -> Iterator[ImageFile]:
    """Yield the images in a folder and below it; folders that cannot be read have an error.

    HEIC files are among them: their rows then say why they are not read.
    """
    errors: list[ImageFile] = []

    def visible(path: str) -> list[os.DirEntry[str]]:
        try:
            return _visible(path)
        except OSError as error:
            errors.append(ImageFile(path, f"the folder cannot be read: {error.strerror}"))
            return []

    for entry in walk(folder, visible):
        if entry.name.lower().endswith((*SUFFIXES, *HEIC_SUFFIXES)) and not is_folder(entry):
            yield ImageFile(entry.path)
    yield from errors


def _visible_if_readable(path: str) -> list[os.DirEntry[str]]:
    try:
        return _visible(path)
    except OSError:
        return []


def _visible(path: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in natural order, without hidden ones."""
    with os.scandir(path) as entries:
        return sorted(
            (entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: natural_key(entry.name)
        )


# ---- From files to rows: decoded by other processes where that pays, classified as they come, in their order.

CHUNK = 64  # files that are decoded and then computed at once; four chunks a processor are held in memory
POOL_FROM = 200  # fewer files are decoded before other processes have started


def classify_files(
    classifier: Classifier, files: Sequence[ImageFile], top: int = TOP
) -> Iterator[tuple[list[Row], Tensor]]:
    """Classifies files in order, a chunk at a time; only some chunks are in memory, however many files there are.

    Yields for each chunk its rows, those of unreadable files with the reason as `error`, and the readable images, uint8
    (B, C, H, W). Raises Failure when a decoding process was ended from outside.
    """
    work = partial(decode_files, size=classifier.size, channels=classifier.channels, resize=classifier.resize)
    chunks = [files[start : start + CHUNK] for start in range(0, len(files), CHUNK)]
    paths = [[file.path for file in chunk if file.error is None] for chunk in chunks]
    indices = count()
    try:
        for chunk, (pixels, errors) in zip(
            chunks, decode_chunks(work, paths, all_cores=len(files) >= POOL_FROM), strict=True
        ):
            array = np.frombuffer(bytearray(pixels), np.uint8).reshape(-1, *classifier.size, classifier.channels)
            images = torch.from_numpy(array).permute(0, 3, 1, 2)
            predictions = iter(classifier.predict_batch(images, top))
            reasons = map(errors.get, count())  # of each file that was given to the decoder, None for the readable ones
            rows = []
            for file in chunk:
                if error := file.error or next(reasons):
                    rows.append(Row(next(indices), (), path=file.path, error=error))
                else:
                    best = next(predictions)
                    rows.append(Row(next(indices), best.top, path=file.path, novelty=best.novelty, unlike=best.unlike))
            yield rows, images
    except BrokenProcessPool as error:
        raise Failure(
            "a decoding process was ended from outside, mostly for want of memory: lower --max-pixels"
        ) from error


# ---- From rows to a contact sheet.

MAX_PICTURES = 120  # on a sheet; of more none would be recognised
SIDE, GAP, LINE_HEIGHT, FONT_SIZE = (
    144,
    12,
    17,
    13,
)  # pixels: of a picture, between pictures, of a line of text, of its letters
COLUMNS = 8
BLACK, GREY, RED = (25, 25, 25), (110, 110, 110), (190, 30, 30)


def contact_sheet(rows: Sequence[Row]) -> Image.Image:
    """The files of at most `MAX_PICTURES` rows, each with its name, class and probability below; unreadable ones are grey.

    The files are read again: a sheet shows them whole and with more pixels, whatever part of them the net was given.
    """
    columns = max(min(COLUMNS, len(rows)), 1)
    lines = 3 if any(row.unlike for row in rows) else 2
    width, height = SIDE + GAP, SIDE + lines * LINE_HEIGHT + GAP
    sheet = Image.new("RGB", (columns * width + GAP, -(-len(rows) // columns) * height + GAP), "white")
    for place, row in enumerate(rows):
        left, top = GAP + place % columns * width, GAP + place // columns * height
        sheet.paste(_thumbnail(row), (left, top))
        draw_caption(sheet, row, left, top + SIDE + 2, SIDE)
    return sheet


def draw_caption(image: Image.Image, row: Row, left: int, top: int, width: int) -> None:
    """Draws name, class and probability of a row, or its error, each line cut to a width in pixels."""
    lines = [(Path(row.path or "").name, GREY)]
    if row.error is not None:
        lines.append((row.error, RED))
    else:
        label, probability = row.top[0]
        lines.append((f"{label} {probability:.2f}", BLACK))
        lines += [("unlike the training", RED)] if row.unlike else []
    for number, (text, colour) in enumerate(lines):
        place = left, top + number * LINE_HEIGHT
        ImageDraw.Draw(image).text(place, _shortened(text, width), fill=colour, font=_font())


def is_picture_name(path: Path) -> bool:
    """Whether pictures can be written to a file of this suffix."""
    return Image.registered_extensions().get(path.suffix.lower()) in Image.SAVE


def save_picture(image: Image.Image, path: Path) -> None:
    """Writes a picture in the format of its suffix; raises Failure where that cannot be done."""
    with writing(path, "Choose another place.", parents=True) as partial:
        image.save(partial, Image.registered_extensions()[path.suffix.lower()])


def _thumbnail(row: Row) -> Image.Image:
    with suppress(DecodeError):  # gone since it was classified
        if row.error is None and row.path is not None:
            return Image.fromarray(decode(row.path, (SIDE, SIDE), resize="letterbox"))
    return Image.new("RGB", (SIDE, SIDE), (225, 225, 225))


def _shortened(text: str, width: int) -> str:
    plain = printable(text)
    kept, short = len(plain), plain
    while kept > 1 and _font().getlength(short) > width:
        kept -= 1
        short = f"{plain[: (kept + 1) // 2]}…{plain[len(plain) - kept // 2 :]}"
    return short


@cache
def _font() -> ImageFont.FreeTypeFont:
    """matplotlib's own font, which has far more letters than Pillow's."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), FONT_SIZE)
