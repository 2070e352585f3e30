"""Cache of decoded images: one memory-mapped file, outside the folder of the images.

Each (root, size, channels, resize) has its own cache folder with

    index.json           shape, files in row order with size, times and inode, unreadable files, near-duplicates
    images-<random>.u8   the pixels, uint8 (N, H, W, C), rows in the order of the readable files
    lock                 held while a process checks the cache or decodes

The index is replaced atomically, after the rows that it names have been synced to disk.
"""

from __future__ import annotations

import json
import mmap
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_lit.base.errors import Failure
from cifar_lit.base.files import atomic_write, write_text
from cifar_lit.base.text import progress
from cifar_lit.data.download import file_lock
from cifar_lit.data.photos.decode import DecodeError, Levels, Preparation, common_levels, decode_all, image_size
from cifar_lit.data.photos.duplicates import near_duplicates
from cifar_lit.data.photos.layout import File
from cifar_lit.data.settings import DataSettings

FORMAT = 7  # incremented when files of the cache, pixels of the decoder or near-duplicates change
OWN_SIZE = 64  # pixels; if no size is set, images of one common size up to this keep it
COMMON_SIZE = (32, 32)  # (H, W) of all other images if no size is set
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python has the name from 3.13 on

Duplicates = list[list[str]]  # paths of near-duplicates, by group


class Index(NamedTuple):
    """Contents of index.json."""

    shape: tuple[int, int, int, int]
    files: list[File]
    bad: dict[str, str]  # reasons why files are unreadable, by path
    data: str
    duplicates: Duplicates
    levels: Levels | None  # values of black and white in 16-bit images


def decoded(settings: DataSettings, arrange: Callable[[Duplicates], Sequence[File]]) -> tuple[np.ndarray, Index]:
    """Return the images of the readable files, uint8 (N, H, W, C), and their index.

    Missing images are decoded and cached, with a progress bar. The array is private to the process: writing to it
    changes no file.

    Args:
        settings: settings of the source. The root is the folder that the files' paths are relative to, or a table in
            it. Without a size, a common size of up to 64 pixels is kept; else images become
            32×32. Without `levels`, those of all 16-bit images are used.
        arrange: function that returns the files in row order, given the near-duplicates.

    Raises:
        Failure: the cache cannot be written.
    """
    files, root, wanted = arrange([]), settings.path, Preparation.of(settings.images)
    real_root = root.resolve()
    key = sha256(json.dumps([FORMAT, str(real_root), *wanted[:3]]).encode()).hexdigest()[:16]
    cache = settings.loading.cache_path / f"{real_root.name[:40]}-{key}"
    folder = root.parent if root.is_file() else root
    try:
        with file_lock(cache / "lock", f"decodes {root}", patience=2):
            index = read_index(cache)
            if index is None or not _is_current(index, folder, files, wanted.levels):
                levels = wanted.levels or common_levels(sorted({f"{folder / file.path}" for file in files}))
                size = wanted.size or _own_size(folder, files)
                index = _decode(cache, folder, files, wanted._replace(size=size, levels=levels))
            ordered = arrange(index.duplicates)
            if index.files != ordered:
                index = _decode(cache, folder, ordered, wanted._replace(size=index.shape[1:3], levels=index.levels))
            return map_images(cache / index.data, index.shape), index
    except OSError as error:
        remedy = "set $CIFAR_LIT_CACHE to another folder"
        fault = f"the decoded images could not be written to {settings.loading.cache_path}: {error.strerror}"
        raise Failure(f"{fault}; {remedy}") from error


def read_index(cache: Path) -> Index | None:
    """Return the index, None if it is missing or damaged, or its data file is incomplete."""
    try:
        values = json.loads((cache / "index.json").read_text(encoding="utf-8"))
        values["files"] = [File(*file) for file in values["files"]]
        values["shape"] = tuple(values["shape"])
        if values["levels"]:
            values["levels"] = tuple(values["levels"])
        index = Index(**values)
        if (cache / index.data).stat().st_size < prod(index.shape):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return index


def _readable(index: Index) -> list[File]:
    """Return the readable files of an index, in the order of their rows."""
    return [file for file in index.files if file.path not in index.bad]


def _is_current(index: Index, folder: Path, files: Sequence[File], levels: Levels | None) -> bool:
    """Return whether a cache has exactly these files, in any order, and these levels if given.

    False if a file that was unreadable is readable now: a change of permissions changes neither size nor time.
    """
    if set(index.files) != set(files):
        return False
    if levels not in (None, index.levels):
        return False
    results = decode_all((f"{folder / path}" for path in index.bad), Preparation((1, 1)))
    return all(isinstance(result, DecodeError) for result in results)


def map_images(path: Path, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Map a file as an array. Processes share its pages until they write; a write stays in memory."""
    if not prod(shape):
        return np.zeros(shape, np.uint8)
    if sys.platform != "linux":
        return np.memmap(path, np.uint8, "c", shape=shape)
    with path.open("rb") as file:  # without NORESERVE, Linux refuses a private mapping larger than its memory
        flags, rights = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return np.frombuffer(mmap.mmap(file.fileno(), prod(shape), flags=flags, prot=rights), np.uint8).reshape(shape)


def _own_size(folder: Path, files: Sequence[File]) -> tuple[int, int]:
    """Return the size (H, W) of all readable images; `COMMON_SIZE` if they differ or are larger than `OWN_SIZE`."""
    sizes = set()
    for file in files:
        with suppress(DecodeError):
            size = image_size(f"{folder / file.path}")
            sizes.add(size)
            if max(size) > OWN_SIZE or len(sizes) > 1:
                return COMMON_SIZE
    return sizes.pop() if sizes else COMMON_SIZE


def _decode(cache: Path, folder: Path, files: Sequence[File], preparation: Preparation) -> Index:
    """Replace the cache by one of `files`. Unchanged images are copied; new and changed ones are decoded."""
    height, width = preparation.size or COMMON_SIZE
    shape = (height, width, preparation.channels)
    old = read_index(cache)
    rows: dict[File, np.ndarray] = {}  # pixels of unchanged files
    if old and (old.shape[1:], old.levels) == (shape, preparation.levels):
        rows = dict(zip(_readable(old), map_images(cache / old.data, old.shape), strict=True))
    new = [file for file in files if file not in rows]
    data = cache / f"images-{secrets.token_hex(4)}.u8"
    bad: dict[str, str] = {}
    bar = progress("decoding images", len(new)) if new else nullcontext(lambda count: None)
    with atomic_write(data) as partial, partial.open("wb") as output, bar as advance:
        results = decode_all((f"{folder / file.path}" for file in new), preparation)
        for file in files:
            row: np.ndarray | DecodeError
            if file in rows:
                row = rows[file]
            else:
                row = next(results)
                advance(1)
            if isinstance(row, DecodeError):
                bad[file.path] = row.reason
            else:
                output.write(row.data)
    index = Index((len(files) - len(bad), *shape), [*files], bad, data.name, [], preparation.levels)
    readable = _readable(index)
    if old and set(readable) == rows.keys():
        duplicates = old.duplicates
    else:
        groups = near_duplicates(map_images(data, index.shape))
        duplicates = [[readable[row].path for row in group] for group in groups]
    index = index._replace(duplicates=duplicates)
    write_text(cache / "index.json", json.dumps(index._asdict()))
    for leftover in cache.glob("images-*"):
        if leftover != data:
            leftover.unlink(missing_ok=True)
    return index
