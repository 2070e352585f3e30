"""Decoded images of a folder, kept in one file outside of it and mapped into memory.

A cache is a folder of its own for each (root, size, channels, way of resizing), with

    index.json           shape, the files with size and time in row order, the damaged ones, the name of the data file, and
                         which pictures are near-duplicates
    images-<random>.u8   the pixels, uint8 (N, H, W, C), rows in the order of the files without the damaged ones; what is behind
                         them does not count
    lock                 held while one process looks or decodes

The index is replaced in one step after the rows that it names are on the disk. While a set is decoded, it names those that are
there from time to time: a decoding that was stopped goes on behind them.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar_lit.data.decode import DecodeError, SizesDiffer, decode_chunks, decode_files, image_size
from cifar_lit.data.download import file_lock
from cifar_lit.data.duplicates import near_duplicates
from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure
from cifar_lit.files import PART, read_text, write_text
from cifar_lit.text import note

FORMAT = 2  # raise it when files of the cache or pixels of the decoder change
MAX_OWN_SIZE = 64  # images that agree in a size up to this keep it …
COMMON_SIZE = 32  # … others get this one when no size is set
MAX_INDEX = 1 << 30  # bytes; a file takes about 100
CHUNK = 64  # files a decoding process takes at a time
SAVE_EVERY = 30.0  # seconds; of what is decoded, so much is lost at most when the process is killed
POOL_FROM_FILES, POOL_FROM_BYTES = 2_000, 64_000_000  # less is decoded before other processes have started
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux' value; Python names it from 3.13 on

Duplicates = list[list[str]]  # paths of pictures that are near-duplicates, by group


class File(NamedTuple):
    """A file: path from the root with "/" between parts, size in bytes and time of change as the file system has them."""

    path: str
    bytes: int
    mtime_ns: int


class Index(NamedTuple):
    """What index.json says; no duplicates were looked for where they are None, as by older versions."""

    shape: tuple[int, int, int, int]
    files: list[File]
    bad: dict[str, str]
    data: str
    duplicates: Duplicates | None


class Decoded(NamedTuple):
    """images: uint8 (N, H, W, C), of the readable files in order. bad: {path: reason} of the others."""

    images: np.ndarray
    bad: dict[str, str]
    duplicates: Duplicates


def decoded(
    root: Path,
    files: Sequence[File],
    arrange: Callable[[Duplicates], Sequence[File]],
    size: tuple[int, int] | None,
    channels: int,
    cache_dir: Path | None = None,
    resize: str = "crop",
) -> Decoded:
    """The images of `files` below `root`, from the cache where it fits, else decoded with a progress bar and cached.

    The array is private to the process: writing to it changes no file.

    Args:
        root: the folder that the files' paths are relative to, or the table beside which they lie.
        files: what to decode, in the order of the rows where there are no near-duplicates.
        arrange: the files in the order of the rows by what is known of near-duplicates.
        size: (H, W) of the images; None for their own size when all agree and it is at most 64, else 32×32.
        channels: 1 or 3.
        cache_dir: `default_cache_dir()` if not given. Where it cannot be written, a line says so, and a temporary file takes
            its place.
        resize: one of `decode.RESIZES`.

    Raises:
        Failure: when the disk is full, or a decoding process was ended.
    """
    real_root = root.resolve()
    # squares that are cut out are named as when there was nothing else, by which their caches are found again
    side = size[0] if size and size[0] == size[1] else size
    named = [FORMAT, str(real_root), side, channels, *([] if resize == "crop" else [resize])]
    key = sha256(json.dumps(named).encode()).hexdigest()[:16]
    slot = (cache_dir or default_cache_dir()).expanduser() / f"{real_root.name[:40]}-{key}"
    folder = root.parent if root.is_file() else root
    with ExitStack() as stack:
        try:
            if slot.is_symlink():  # none of ours: what is removed and written here would be somewhere else
                raise OSError(errno.ELOOP, f"{slot.name} is a link")
            stack.enter_context(file_lock(slot / "lock", f"decodes {root}", patience=2))
        except OSError as error:
            index = _load(slot, folder, files)
            if index and (index := _searched(slot, index)).files == arrange(index.duplicates or []):
                return _mapped(slot, index)  # a read-only cache is still a cache
            text = f"nothing is cached: {slot.parent}: {error.strerror or type(error).__name__}"
            note(f"{text}; $CIFAR_LIT_CACHE can name another folder")
            # the mapped file lives on without its name
            slot = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="cifar-lit-", ignore_cleanup_errors=True))
            )
        index = _load(slot, folder, files) or _decode_own_size(slot, folder, files, size, channels, resize)
        if index.duplicates is None:
            index = _searched(slot, index)
            with suppress(OSError):  # of a disk that is full now; next time they are looked for again
                write_text(slot / "index.json", json.dumps(index._asdict()))
        ordered = arrange(index.duplicates or [])
        if index.files != ordered:
            index = _decode(slot, folder, ordered, index.shape[1:3], channels, resize)
        return _mapped(slot, index)


def default_cache_dir() -> Path:
    """Where caches lie: $CIFAR_LIT_CACHE, else $XDG_CACHE_HOME/cifar-lit, else ~/.cache/cifar-lit."""
    if directory := os.environ.get("CIFAR_LIT_CACHE"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cifar-lit"


def read_index(slot: Path) -> Index | None:
    """The index, or None when there is none, it is damaged, or its data file is not whole."""
    try:
        values = json.loads(read_text(slot / "index.json", MAX_INDEX))
        rows, height, width, channels = map(int, values["shape"])
        files = [File(str(path), int(size), int(mtime_ns)) for path, size, mtime_ns in values["files"]]
        bad = {str(path): str(reason) for path, reason in values["bad"].items()}
        groups = values.get("duplicates")
        duplicates = groups if groups is None else [[str(path) for path in group] for group in groups]
        index = Index((rows, height, width, channels), files, bad, values["data"], duplicates)
        if not re.fullmatch(r"images-[0-9a-f]+\.u8", index.data):  # a path would lead to any file
            return None
        readable = sum(file.path not in index.bad for file in files)
        whole = readable == rows == len(files) - len(bad) and min(height, width, channels) > 0
        whole = whole and (slot / index.data).stat().st_size >= prod(index.shape)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return index if whole else None


def _load(slot: Path, folder: Path, files: Sequence[File]) -> Index | None:
    """What the cache holds, None when it does not hold exactly these files, in whatever order."""
    index = read_index(slot)
    if index is None or len(index.files) != len(files) or set(index.files) != set(files):
        return None
    return index if _are_damaged_still(index, folder) else None


def _are_damaged_still(index: Index, folder: Path) -> bool:
    """Whether no file that could not be read, for want of rights, is readable now, with size and time as before."""
    bad = [str(folder / path) for path in index.bad]
    return len(decode_files(bad, (1, 1), 3)[1]) == len(bad)


def _holds_the_first(slot: Path, index: Index, folder: Path, files: Sequence[File]) -> bool:
    """Whether a cache holds the first of `files` in their order, so that the others can be written behind them."""
    if index.files != list(files[: len(index.files)]):
        return False
    state = (slot / index.data).lstat()
    own = stat.S_ISREG(state.st_mode) and state.st_nlink == 1  # a link would lead to any file
    return own and _are_damaged_still(index, folder)


def _searched(slot: Path, index: Index) -> Index:
    """The index with the near-duplicates among its images."""
    if index.duplicates is not None:
        return index
    readable = [file.path for file in index.files if file.path not in index.bad]
    groups = near_duplicates(map_images(slot / index.data, index.shape))
    return index._replace(duplicates=[[readable[row] for row in group] for group in groups])


def _mapped(slot: Path, index: Index) -> Decoded:
    return Decoded(map_images(slot / index.data, index.shape), index.bad, index.duplicates or [])


def map_images(path: Path, shape: tuple[int, int, int, int]) -> np.ndarray:
    """The file as an array: pages are shared between processes until written to, and a write stays in memory."""
    if not prod(shape):
        return np.zeros(shape, np.uint8)
    if sys.platform != "linux":
        return np.memmap(path, np.uint8, "c", shape=shape)
    with path.open("rb") as file:  # without NORESERVE, Linux refuses a private mapping larger than its memory
        flags, rights = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return np.frombuffer(mmap.mmap(file.fileno(), prod(shape), flags=flags, prot=rights), np.uint8).reshape(shape)


def _decode_own_size(
    slot: Path, folder: Path, files: Sequence[File], size: tuple[int, int] | None, channels: int, resize: str
) -> Index:
    """Decodes `files` to `size` or, where it is None, to their own size or squares of 32."""
    if size is not None:
        return _decode(slot, folder, files, size, channels, resize)
    for file in files:
        with suppress(DecodeError):
            if max(own_size := image_size(folder / file.path)) <= MAX_OWN_SIZE:
                with suppress(SizesDiffer):
                    return _decode(slot, folder, files, own_size, channels, resize, all_of_size=True)
            break
    return _decode(slot, folder, files, (COMMON_SIZE, COMMON_SIZE), channels, resize)


def _decode(
    slot: Path,
    folder: Path,
    files: Sequence[File],
    size: tuple[int, int],
    channels: int,
    resize: str,
    all_of_size: bool = False,
) -> Index:
    """Decodes `files`, but for those that the cache at `slot` has unchanged, and replaces it, or adds to it what comes behind."""
    rows: dict[File, memoryview | bytes | str] = {}  # pixels, or the reason why there are none
    duplicates: Duplicates | None = None
    bad: dict[str, str] = {}
    done, data = 0, slot / f"images-{secrets.token_hex(4)}.u8"
    before = read_index(slot)
    same_shape = before is None or before.shape[1:] == (*size, channels)
    if before and same_shape:
        if _holds_the_first(slot, before, folder, files):
            bad, done, data = {**before.bad}, len(before.files), slot / before.data
        else:
            duplicates, wanted = before.duplicates if set(before.files) == set(files) else None, set(files)
            readable = (file for file in before.files if file.path not in before.bad)
            images = map_images(slot / before.data, before.shape)
            rows = {file: row.data for file, row in zip(readable, images, strict=True) if file in wanted}
    index: Index | None = None
    # of what is copied there is a cache already, and a cache of images of another size may be what is asked for after this try
    saves = not rows and (same_shape or not all_of_size)
    left = files[done:]
    new = [file for file in left if file not in rows]
    row_bytes = prod(size) * channels

    def new_rows() -> Iterator[bytes | str]:
        paths = [f"{folder / file.path}" for file in new]
        chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
        all_cores = len(new) >= POOL_FROM_FILES or sum(file.bytes for file in new) >= POOL_FROM_BYTES
        work = partial(decode_files, size=size, channels=channels, resize=resize, all_of_size=all_of_size)
        for chunk, (pixels, reasons) in zip(chunks, decode_chunks(work, chunks, all_cores), strict=True):
            decoded_rows = (pixels[start : start + row_bytes] for start in range(0, len(pixels), row_bytes))
            advance(len(chunk))
            yield from (
                reasons[position] if position in reasons else next(decoded_rows) for position in range(len(chunk))
            )

    def save() -> Index:
        """Has the index name what is there so far."""
        output.flush()
        os.fsync(output.fileno())
        named = list(files[:done])
        reasons = {file.path: bad[file.path] for file in named if file.path in bad}
        index = Index((done - len(reasons), *size, channels), named, reasons, data.name, duplicates)
        write_text(slot / "index.json", json.dumps(index._asdict()))
        return index

    try:
        if shutil.disk_usage(slot).free < len(left) * row_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        bar = progress("decoding images", len(new)) if new else nullcontext(lambda count: None)
        with data.open("r+b" if before and data.name == before.data else "xb") as output, bar as advance:
            output.truncate((done - len(bad)) * row_bytes)
            output.seek(0, os.SEEK_END)
            made, saved = new_rows(), time.monotonic()
            try:
                for file in left:
                    row = rows[file] if file in rows else next(made)
                    if isinstance(row, str):
                        bad[file.path] = row
                    else:
                        output.write(row)
                    done += 1
                    if saves and time.monotonic() - saved > SAVE_EVERY:
                        save()
                        saved = time.monotonic()
            except (OSError, SizesDiffer):
                raise
            except BaseException:  # Ctrl-C, a signal, a decoding process that was killed
                if saves and done:
                    with suppress(OSError):
                        save()
                raise
            if before and bad.keys() != before.bad.keys():
                duplicates = None  # as there are further pictures now
            index = save()
    except BrokenProcessPool as error:
        raise Failure("a decoding process was ended from outside, mostly for want of memory: start again") from error
    except OSError as error:
        need = f"they need {len(left) * row_bytes / 1e6:,.1f} MB there, or in another folder named by $CIFAR_LIT_CACHE"
        raise Failure(f"the decoded images could not be written to {slot.parent}: {error.strerror}; {need}") from error
    finally:
        named = index or read_index(slot)  # by what the disk says: it may have been saved just before this was stopped
        if named and named.data == data.name:
            with suppress(OSError):
                os.truncate(data, prod(named.shape))
        for leftover in (*slot.glob("images-*.u8"), *slot.glob(f"*{PART}")):
            if not named or leftover.name != named.data:
                leftover.unlink(missing_ok=True)
    return index
