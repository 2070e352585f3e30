"""Pictures of what was classified: contact sheets, and the words under pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from cifar_lit.data.decode import DecodeError, decode
from cifar_lit.errors import Failure
from cifar_lit.runs.predictions import Row

MOST = 120  # pictures on a sheet; more would be neither found nor opened
SIDE, GAP, LINE, SIZE = 144, 12, 17, 13  # pixels: of a picture, between pictures, of a line of text, of its letters
COLUMNS = 8
INK, FAINT, ALARM = (25, 25, 25), (110, 110, 110), (190, 30, 30)


def contact_sheet(rows: Sequence[Row]) -> Image.Image:
    """The files of some rows, each with its name, class and probability below; those that cannot be read as a grey field.

    The files are read again, for more pixels than the net was given. At most `MOST` rows are meant to be on a sheet.
    """
    columns = max(min(COLUMNS, len(rows)), 1)
    lines = 3 if any(row.unlike for row in rows) else 2
    width, height = SIDE + GAP, SIDE + lines * LINE + GAP
    sheet = Image.new("RGB", (columns * width + GAP, -(-len(rows) // columns) * height + GAP), "white")
    for place, row in enumerate(rows):
        left, top = GAP + place % columns * width, GAP + place // columns * height
        sheet.paste(_picture(row), (left, top))
        write_lines(sheet, lines_of(row), left, top + SIDE + 2, SIDE)
    return sheet


def lines_of(row: Row) -> list[tuple[str, tuple[int, int, int]]]:
    """What stands below a picture: lines with their colours."""
    name = (Path(row.path or "").name, FAINT)
    if row.error is not None:
        return [name, (row.error, ALARM)]
    label, probability = row.top[0]
    return [name, (f"{label} {probability:.2f}", INK), *([("unlike the training", ALARM)] if row.unlike else [])]


def write_lines(image: Image.Image, lines: Sequence[tuple[str, tuple[int, int, int]]], left: int, top: int, width: int) -> None:
    """Writes lines below each other, each cut to a width in pixels."""
    draw = ImageDraw.Draw(image)
    for number, (text, colour) in enumerate(lines):
        draw.text((left, top + number * LINE), _cut(text, width), fill=colour, font=_font())


def save_picture(image: Image.Image, path: Path) -> None:
    """Writes a picture in the format of its suffix; raises Failure where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}. Choose another place.") from None


def _picture(row: Row) -> Image.Image:
    if row.error is None and row.path is not None:
        try:
            return Image.fromarray(decode(row.path, (SIDE, SIDE)))
        except DecodeError:  # gone since it was classified
            pass
    return Image.new("RGB", (SIDE, SIDE), (225, 225, 225))


def _cut(text: str, width: int) -> str:
    """A text that is no wider than so many pixels; of a longer one, beginning and end."""
    plain = "".join(letter if letter.isprintable() else "�" for letter in text)
    kept = len(plain)
    short = plain
    while kept > 1 and _font().getlength(short) > width:
        kept -= 1
        short = f"{plain[: (kept + 1) // 2]}…{plain[len(plain) - kept // 2 :]}"
    return short


@cache
def _font() -> ImageFont.FreeTypeFont:
    """matplotlib's own font, which has far more letters than Pillow's."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), SIZE)
