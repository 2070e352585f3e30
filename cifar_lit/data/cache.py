"""Cache of decoded images: one memory-mapped file, outside the folder of the images.

Each (root, size, channels, resize) has its own cache folder with

    index.json           shape, files in row order with size and time, unreadable files, data file, near-duplicates
    images-<random>.u8   the pixels, uint8 (N, H, W, C), rows in the order of the readable files
    lock                 held while a process checks the cache or decodes

The index is replaced atomically, after the rows that it names have been synced to disk. It is also saved periodically
during decoding, so that interrupted decoding resumes.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext, suppress
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_lit.data.decode import (
    DecodeError,
    Levels,
    Preparation,
    SizesDiffer,
    common_levels,
    decode_chunks,
    decode_files,
    image_size,
    level_sample,
)
from cifar_lit.data.download import file_lock
from cifar_lit.data.duplicates import near_duplicates
from cifar_lit.data.progress import progress
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.errors import Failure
from cifar_lit.files import PART, read_text, write_text
from cifar_lit.text import note

FORMAT = 4  # incremented when files of the cache or pixels of the decoder change
MAX_OWN_SIZE = 64  # pixels; if no size is set, images of one common size up to this keep it
COMMON_SIZE = 32  # pixels; side of all other images if no size is set
MAX_INDEX = 1 << 30  # bytes; a file takes about 100
CHUNK = 64  # files that a decoding process takes at a time
SAVE_EVERY = 30.0  # seconds; a killed process loses this much work at most
POOL_FROM_FILES, POOL_FROM_BYTES = 2_000, 64_000_000  # smaller jobs end before worker processes would have started
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python has the name from 3.13 on

Duplicates = list[list[str]]  # paths of near-duplicates, by group


class File(NamedTuple):
    """A file: path below the root with "/" between its parts, size in bytes, and modification time."""

    path: str
    bytes: int
    mtime_ns: int


def file_at(place: str, path: str) -> File:
    """Return the file at a place. A missing one has no bytes: decoding reports it."""
    try:
        status = os.stat(place)  # noqa: PTH116 (faster than Path for many files)
    except OSError:
        return File(path, 0, 0)
    return File(path, status.st_size, status.st_mtime_ns)


class Index(NamedTuple):
    """Contents of index.json."""

    shape: tuple[int, int, int, int]
    files: list[File]
    bad: dict[str, str]  # reasons why files are unreadable, by path
    data: str
    duplicates: Duplicates | None  # None until they have been searched
    levels: Levels | None  # values of black and white in 16-bit images


def decoded(
    root: Path,
    files: Sequence[File],
    arrange: Callable[[Duplicates], Sequence[File]],
    size: tuple[int, int] | None,
    settings: SourceSettings,
) -> tuple[np.ndarray, Index]:
    """Return the images of the readable files, uint8 (N, H, W, C), and their index.

    Missing images are decoded and cached, with a progress bar. The array is private to the process: writing to it
    changes no file.

    Args:
        root: the folder that the files' paths are relative to, or a table in that folder.
        files: the files, in row order if there are no near-duplicates.
        arrange: function that returns the files in row order, given the near-duplicates.
        size: (H, W) of the images. If None, a common size of up to 64 pixels is kept; else images become 32×32.
        settings: settings of the source. Without `levels`, those of all 16-bit images are used. If the folder of all
            caches is not writable, a note says so, and a temporary file is used.

    Raises:
        Failure: the disk is full, or a decoding process was killed.
    """
    real_root = root.resolve()
    channels = settings.channels or 3
    key = sha256(json.dumps([FORMAT, str(real_root), size, channels, settings.resize]).encode()).hexdigest()[:16]
    cache = settings.cache_path / f"{real_root.name[:40]}-{key}"
    folder = root.parent if root.is_file() else root
    with ExitStack() as stack:
        try:
            if cache.is_symlink():  # not created by this program, so its target must not be changed
                raise OSError(errno.ELOOP, f"{cache.name} is a link")
            stack.enter_context(file_lock(cache / "lock", f"decodes {root}", patience=2))
        except OSError as error:
            index = _load(cache, folder, files, settings.levels)
            if index and (index := _searched(cache, index)).files == arrange(index.duplicates or []):
                return map_images(cache / index.data, index.shape), index  # a read-only cache can still be used
            reason = error.strerror or type(error).__name__
            note(f"nothing is cached: {settings.cache_path}: {reason}; set $CIFAR_LIT_CACHE to another folder")
            temporary = tempfile.TemporaryDirectory(prefix="cifar-lit-", ignore_cleanup_errors=True)
            cache = Path(stack.enter_context(temporary))  # the mapping survives the deletion of its file
        index = _load(cache, folder, files, settings.levels)
        if index is None:
            levels = settings.levels or _common_levels(folder, files)
            preparation = Preparation((COMMON_SIZE, COMMON_SIZE), channels, settings.resize, levels)
            index = _decode_to(cache, folder, files, size, preparation)
        if index.duplicates is None:
            index = _searched(cache, index)
            with suppress(OSError):  # with a full disk, near-duplicates are searched again next time
                _write_index(cache, index)
        ordered = arrange(index.duplicates or [])
        if index.files != ordered:
            preparation = Preparation(index.shape[1:3], channels, settings.resize, index.levels)
            index = _decode(cache, folder, ordered, preparation)
        return map_images(cache / index.data, index.shape), index


def read_index(cache: Path) -> Index | None:
    """Return the index, None if it is missing or damaged, or its data file is incomplete."""
    try:
        values = json.loads(read_text(cache / "index.json", MAX_INDEX))
        rows, height, width, channels = map(int, values["shape"])
        files = [File(str(path), int(size), int(mtime_ns)) for path, size, mtime_ns in values["files"]]
        bad = {str(path): str(reason) for path, reason in values["bad"].items()}
        index = Index((rows, height, width, channels), files, bad, values["data"], None, None)
        if values["duplicates"] is not None:
            index = index._replace(duplicates=[list(map(str, group)) for group in values["duplicates"]])
        if values["levels"] is not None:
            black, white = map(int, values["levels"])
            index = index._replace(levels=(black, white))
        if not re.fullmatch(r"images-[0-9a-f]+\.u8", index.data):  # a path could lead to any file
            return None
        is_complete = len(_readable(index)) == rows == len(files) - len(bad) and min(height, width, channels) > 0
        if not is_complete or (cache / index.data).stat().st_size < prod(index.shape):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return index


def _readable(index: Index) -> list[File]:
    """Return the readable files of an index, in the order of their rows."""
    return [file for file in index.files if file.path not in index.bad]


def _write_index(cache: Path, index: Index) -> None:
    write_text(cache / "index.json", json.dumps(index._asdict()))


def _load(cache: Path, folder: Path, files: Sequence[File], levels: Levels | None) -> Index | None:
    """Return the index of a cache with exactly these files, in any order, and these levels if given, else None.

    Also None if a file that was unreadable is readable now: a change of permissions changes neither size nor time.
    """
    index = read_index(cache)
    if index is None or len(index.files) != len(files) or set(index.files) != set(files):
        return None
    if levels and index.levels != levels:
        return None
    bad = [str(folder / path) for path in index.bad]
    if len(decode_files(bad, Preparation((1, 1)))[1]) < len(bad):
        return None
    return index


def _searched(cache: Path, index: Index) -> Index:
    """Return the index with the near-duplicates of its images."""
    if index.duplicates is not None:
        return index
    readable = _readable(index)
    duplicates = []
    for group in near_duplicates(map_images(cache / index.data, index.shape)):
        duplicates.append([readable[row].path for row in group])
    return index._replace(duplicates=duplicates)


def map_images(path: Path, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Map a file as an array. Processes share its pages until they write; a write stays in memory."""
    if not prod(shape):
        return np.zeros(shape, np.uint8)
    if sys.platform != "linux":
        return np.memmap(path, np.uint8, "c", shape=shape)
    with path.open("rb") as file:  # without NORESERVE, Linux refuses a private mapping larger than its memory
        flags, rights = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return np.frombuffer(mmap.mmap(file.fileno(), prod(shape), flags=flags, prot=rights), np.uint8).reshape(shape)


def _common_levels(folder: Path, files: Sequence[File]) -> Levels | None:
    paths = sorted({file.path for file in files})
    return common_levels([f"{folder / path}" for path in level_sample(paths)])


def _decode_to(
    cache: Path, folder: Path, files: Sequence[File], size: tuple[int, int] | None, preparation: Preparation
) -> Index:
    """Decode `files` to `size`; if it is None, to their own size or to that of `preparation`."""
    if size is not None:
        return _decode(cache, folder, files, preparation._replace(size=size))
    own_size = _first_size(folder, files)
    if own_size is not None and max(own_size) <= MAX_OWN_SIZE:
        with suppress(SizesDiffer):
            return _decode(cache, folder, files, preparation._replace(size=own_size), all_of_size=True)
    return _decode(cache, folder, files, preparation)


def _first_size(folder: Path, files: Sequence[File]) -> tuple[int, int] | None:
    """Return the size (H, W) of the first readable image; None if there is none."""
    for file in files:
        with suppress(DecodeError):
            return image_size(f"{folder / file.path}")
    return None


def _decode(
    cache: Path, folder: Path, files: Sequence[File], preparation: Preparation, all_of_size: bool = False
) -> Index:
    """Replace the cache by one of `files`. Unchanged images are copied; new and changed ones are decoded."""
    shape = (*preparation.size, preparation.channels)
    row_bytes = prod(shape)
    data = cache / f"images-{secrets.token_hex(4)}.u8"
    old = read_index(cache)
    # Keep an old cache of another shape until all images are known to have the same size.
    may_replace = old is None or old.shape[1:] == shape or not all_of_size
    rows: dict[File, memoryview] = {}  # pixels of unchanged files
    duplicates: Duplicates | None = None
    if old and old.shape[1:] == shape and old.levels == preparation.levels:
        wanted = set(files)
        images = map_images(cache / old.data, old.shape)
        for file, row in zip(_readable(old), images, strict=True):
            if file in wanted:
                rows[file] = row.data
        if set(old.files) == wanted:
            duplicates = old.duplicates
    new = [file for file in files if file not in rows]
    left_to_copy = len(rows)
    bad: dict[str, str] = {}
    index: Index | None = None

    def new_rows() -> Iterator[bytes | str]:
        """Yield the pixels of each new file, or the reason why it is unreadable."""
        chunks = [new[start : start + CHUNK] for start in range(0, len(new), CHUNK)]
        paths = ([f"{folder / file.path}" for file in chunk] for chunk in chunks)
        all_cores = len(new) >= POOL_FROM_FILES or sum(file.bytes for file in new) >= POOL_FROM_BYTES
        results = decode_chunks(paths, preparation, all_cores, all_of_size)
        for chunk, (pixels, reasons) in zip(chunks, results, strict=True):
            readable_rows = (pixels[start : start + row_bytes] for start in range(0, len(pixels), row_bytes))
            advance(len(chunk))
            for position in range(len(chunk)):
                yield reasons[position] if position in reasons else next(readable_rows)

    def save(count: int) -> Index:
        """Sync the images to disk, and write an index of the first `count` files."""
        output.flush()
        os.fsync(output.fileno())
        done_files = list(files[:count])
        reasons = {file.path: bad[file.path] for file in done_files if file.path in bad}
        shape_of_all = (count - len(reasons), *shape)
        index = Index(shape_of_all, done_files, reasons, data.name, duplicates, preparation.levels)
        _write_index(cache, index)
        return index

    try:
        if shutil.disk_usage(cache).free < len(files) * row_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        bar = progress("decoding images", len(new)) if new else nullcontext(lambda count: None)
        with data.open("xb") as output, bar as advance:
            decoded_rows, saved, done = new_rows(), time.monotonic(), 0
            try:
                for done, file in enumerate(files):
                    # Until all unchanged rows are copied, the old cache holds more images than the new one.
                    if may_replace and not left_to_copy and time.monotonic() - saved > SAVE_EVERY:
                        save(done)
                        saved = time.monotonic()
                    row = rows[file] if file in rows else next(decoded_rows)
                    if isinstance(row, str):
                        bad[file.path] = row
                    else:
                        output.write(row)
                    left_to_copy -= file in rows
            except (OSError, SizesDiffer):
                raise
            except BaseException:  # Ctrl-C, a signal, or a decoding process that was killed
                if may_replace and not left_to_copy and done:
                    with suppress(OSError):
                        save(done)
                raise
            if old and bad.keys() != old.bad.keys():
                duplicates = None  # the set of readable images has changed
            index = save(len(files))
    except BrokenProcessPool as error:
        raise Failure("a decoding process was killed, probably for lack of memory: start again to resume") from error
    except OSError as error:
        need = f"free {len(files) * row_bytes / 1e6:,.1f} MB there, or set $CIFAR_LIT_CACHE to another folder"
        raise Failure(f"the decoded images could not be written to {cache.parent}: {error.strerror}; {need}") from error
    finally:
        current = index or read_index(cache)  # an index may have been saved just before an interruption
        for leftover in (*cache.glob("images-*.u8"), *cache.glob(f"*{PART}")):
            if not current or leftover.name != current.data:
                leftover.unlink(missing_ok=True)
    return index
