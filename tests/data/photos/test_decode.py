"""Decoding of single image files. tests/inference/odd_files.py has many more formats."""

from __future__ import annotations

import base64
import io
import pickle
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from inference.odd_files import encoded, png
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from cifar_lit.data.photos.decode import DecodeError, Preparation, decode, decode_all, image_size, pixels_of

# A HEIC of 48 × 48 pixels: red and green above blue and white.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWl4AAAAAG1pZjFoZWl4bWlhZgAAAX5tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAACJp"
    "bG9jAAAAAERAAAEAAQAAAAABogABAAAAAAAAAEQAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRtAAAAAAAB"
    "AAAA/mlwcnAAAADeaXBjbwAAAHdodmNDAQQIAAAAnjgAAAAAHvAA/P/4+AAADwNgAAEAF0ABDAH//wQIAAADAJ44AAADAAAeugJAYQAB"
    "ACpCAQEECAAAAwCeOAAAAwAAHpAEECCy3VyU1zcBDQYEAAADAGQAAAMABCBiAAEACEQBwXMYMAiQAAAAE2NvbHJuY2x4AAEADQAGgAAA"
    "ABRpc3BlAAAAAAAAAEAAAABAAAAAKGNsYXAAAAAwAAAAAQAAADAAAAAB////8AAAAAL////wAAAAAgAAABBwaXhpAAAAAAMICAgAAAAY"
    "aXBtYQAAAAAAAAABAAEFgQIDBYQAAABMbWRhdAAAAEAoAa8J4CM/M/8C3/+7roez0W9yg8uhs+fj/4MWb89noRS/f7ydDfNz80tYVwqe"
    "drHOtHnT3xxbgLIcjb9y2/em"
)


def blocks(height: int = 32, width: int = 32, seed: int = 0) -> Image.Image:
    """Return an RGB image of 4 × 4 blocks in random colours."""
    cells = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(cells, np.ones((4, 4, 1), np.uint8)))


@pytest.mark.parametrize(
    ("file_format", "settings", "tolerance"),
    [
        ("JPEG", {"quality": 95, "subsampling": 0}, 12), ("PNG", {}, 0), ("WEBP", {"lossless": True}, 0),
        ("BMP", {}, 0), ("TIFF", {}, 0), ("TIFF", {"compression": "tiff_adobe_deflate"}, 0), ("PPM", {}, 0),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 3),
    ],
)  # fmt: skip
def test_each_format_decodes_to_saved_pixels(tmp_path: Path, file_format: str, settings: dict, tolerance: int) -> None:
    # The content determines the format, not the suffix.
    (tmp_path / "a.txt").write_bytes(encoded(blocks(24, 32), file_format, **settings))
    pixels = decode(tmp_path / "a.txt")
    assert pixels.dtype == np.uint8 and pixels.shape == (24, 32, 3) and pixels.flags.writeable
    assert np.abs(pixels.astype(int) - np.asarray(blocks(24, 32)).astype(int)).mean() <= tolerance


def test_white_figures_on_a_transparent_ground_are_seen_on_grey() -> None:
    image = Image.new("RGBA", (8, 8), (255, 255, 255, 0))
    image.paste((255, 255, 255, 255), (0, 0, 4, 8))
    pixels = decode(io.BytesIO(encoded(image, "PNG")))
    assert (pixels[:, :4] == 255).all() and (pixels[:, 4:] == 128).all()


def test_transparency_is_blended_with_white() -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 128), (0, 0, 4, 8))
    pixels = decode(io.BytesIO(encoded(image, "PNG"))).astype(int)
    assert (np.abs(pixels[:, :4] - 127) <= 1).all() and (pixels[:, 4:] == 255).all()


LETTERBOX = partial(ImageOps.pad, color=(128, 128, 128))
PILLOWS = {"crop": ImageOps.fit, "letterbox": LETTERBOX, "squash": Image.Image.resize}


@pytest.mark.parametrize("resize", PILLOWS)
def test_each_resize_mode_equals_pillows_for_all_proportions(resize: str) -> None:
    for height, width in ((64, 64), (40, 96), (100, 36), (8, 76)):
        image = blocks(height, width)
        data = encoded(image, "PNG")
        for size in ((24, 24), (24, 40), (33, 20), (64, 64)):
            expected = np.asarray(PILLOWS[resize](image, size[::-1], Image.Resampling.BICUBIC))
            assert np.array_equal(decode(io.BytesIO(data), Preparation(size, resize=resize)), expected), size
            assert np.array_equal(pixels_of(image, Preparation(size, resize=resize)), expected)


def test_a_large_jpeg_is_decoded_at_a_reduced_size_of_at_least_twice_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, sizes, exif = JpegImageFile.load, [], Image.Exif()

    def load_and_note(image: JpegImageFile) -> object:
        sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(JpegImageFile, "load", load_and_note)
    exif[0x0112] = 6  # a landscape file with a portrait image
    jpeg = encoded(blocks(400, 1600), "JPEG", exif=exif)
    assert decode(io.BytesIO(jpeg), Preparation((100, 90))).shape[:2] == (100, 90) and sizes[0] == (800, 200)


ENCODINGS = [
    *((name, {}) for name in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "AVIF")),
    ("JPEG", {"progressive": True}),
    ("TIFF", {"compression": "tiff_lzw"}),
]


@pytest.mark.parametrize(("file_format", "settings"), [*ENCODINGS, ("WEBP", {"lossless": True})])
def test_files_truncated_anywhere_or_filled_with_zeros_are_errors(file_format: str, settings: dict) -> None:
    data = encoded(blocks(64, 64), file_format, **settings)
    plain = ("BMP", "PPM", *(["TIFF"] if not settings else []))  # zeros are black pixels
    end = len(data) - (8 if file_format == "PNG" else 1)
    for length in [0, *range(1, end, len(data) // 25), end]:
        with pytest.raises(DecodeError):
            decode(io.BytesIO(data[:length]))
        if 0 < length < len(data) - 40 and file_format not in plain and "progressive" not in settings:
            with pytest.raises(DecodeError):
                decode(io.BytesIO(data[:length] + bytes(len(data) - length)))


def test_data_after_the_end_of_an_image_are_ignored() -> None:
    """Phones append videos to JPEGs, and some programs pad PNGs with zeros."""
    data = encoded(blocks(64, 64), "JPEG")
    whole = decode(io.BytesIO(data))
    for video in (b"\xff\xd9 \xff\xda film", bytes(4000)):
        assert (decode(io.BytesIO(data + video)) == whole).all()
    assert (decode(io.BytesIO(encoded(blocks(), "PNG") + bytes(1_000_000))) == np.asarray(blocks())).all()
    thumbnail = encoded(blocks(8, 8), "JPEG")
    exif = b"\xff\xe1" + (2 + len(thumbnail)).to_bytes(2, "big") + thumbnail  # contains an end marker
    with pytest.raises(DecodeError, match="cut short"):
        decode(io.BytesIO(data[:2] + exif + data[2 : len(data) // 2] + bytes(len(data) // 2)))


def test_errors_give_name_and_reason_and_image_size_reads_the_header_only(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    data = encoded(blocks(16, 32), "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data[:-200])
    (tmp_path / "b.jpg").write_text("<html>not found</html>")
    reasons = {
        "a.jpg": "cut short",
        "b.jpg": "not a JPEG, PNG",
        "c.jpg": "missing: there is no such file",
        "d.jpg": "a pointer of Git LFS, the image is not here: git lfs pull",
        "e.tif": "not a JPEG, PNG",
    }
    (tmp_path / "d.jpg").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 904052\n")
    (tmp_path / "e.tif").write_bytes(b"II*\0" + bytes(40))
    for name, reason in reasons.items():
        with pytest.raises(DecodeError, match=rf"{name} cannot be read as an image: {reason}") as caught:
            decode(tmp_path / name)
        assert caught.value.exit_code == 1 and str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    (tmp_path / "a.jpg").write_bytes(data[:-200] + data[-2:])
    assert image_size(tmp_path / "a.jpg") == (32, 16)
    with pytest.raises(DecodeError, match="not a JPEG, PNG"):
        image_size(tmp_path / "b.jpg")


def test_images_above_twice_pillows_limit_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    with pytest.raises(DecodeError, match="could be decompression bomb"):
        decode(io.BytesIO(encoded(blocks(32, 40), "PNG")))


def test_many_files_are_decoded_in_order_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.png") for number in range(40)]
    for number, path in enumerate(paths):
        blocks(seed=number).save(path)
    Path(paths[4]).write_bytes(b"GIF89a")
    results = list(decode_all(paths, Preparation((32, 32))))
    error = results.pop(4)
    assert isinstance(error, DecodeError) and error.name == paths[4]
    expected = [np.asarray(blocks(seed=number)) for number in range(40) if number != 4]
    assert all(np.array_equal(*pair) for pair in zip(results, expected, strict=True))


def test_a_heic_is_read_with_the_extra_photos_and_refused_when_damaged() -> None:
    pytest.importorskip("pi_heif", reason="pip install -e '.[photos]'")
    pixels = decode(io.BytesIO(HEIC)).astype(int)
    quarters = np.array([pixels[y, x] for y, x in ((6, 6), (6, 40), (40, 6), (40, 40))])
    expected = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]])
    assert pixels.shape == (48, 48, 3) and np.abs(quarters - expected).max() < 20
    for length in range(20, len(HEIC), 60):
        with pytest.raises(DecodeError, match="cannot be read as an image"):
            decode(io.BytesIO(HEIC[:length]))
    claim = HEIC.index(b"ispe") + 8
    with pytest.raises(DecodeError, match=r"Decoded image does not have the size signaled in the file"):
        decode(io.BytesIO(HEIC[:claim] + b"\0\0\x30\0" * 2 + HEIC[claim + 8 :]))


def test_the_picture_of_a_caller_is_not_turned() -> None:
    picture = Image.new("RGB", (8, 4))
    picture.getexif()[0x0112] = 6  # to be shown upright
    assert pixels_of(picture, Preparation(size=(8, 4))).shape == (8, 4, 3)
    assert picture.size == (8, 4) and picture.getexif()[0x0112] == 6


def test_dark_16_bit_colours_are_refused_with_a_remedy(tmp_path: Path) -> None:
    rows = (b"\0" + struct.pack(">H", 3000) * 24) * 8  # 12 of 16 bits
    (tmp_path / "dark.png").write_bytes(png(8, 8, 16, rows))
    with pytest.raises(DecodeError, match="12 bits or fewer: magick mogrify"):
        decode(tmp_path / "dark.png", Preparation((8, 8)))
