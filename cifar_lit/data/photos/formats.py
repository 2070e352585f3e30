"""Suffixes of images and tables."""

from importlib.util import find_spec

HAS_HEIF = find_spec("pi_heif") is not None  # the extra `photos`
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
# Images in folders. Files with other suffixes are ignored.
IMAGES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".avif",
    *(HEIC_SUFFIXES if HAS_HEIF else ()),
)  # fmt: skip
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
