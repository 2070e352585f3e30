"""Atomic writes: write to a temporary file, sync it to disk, then rename it.

The temporary name is random and unused, and renaming replaces a symlink instead of following it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_lit.base.errors import Failure, UsageError

if TYPE_CHECKING:
    import numpy as np

PART = ".cifar-lit-part"  # suffix of temporary files, unique to this program, so that leftovers can be removed
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
REPLACE_SECONDS = 2.0 if os.name == "nt" else 0.0  # how long to wait for a file that is in use


def find_os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that `error` is or was raised from, or None.

    A failed write in torch.save raises a RuntimeError about file positions, with the OSError as its `__context__`.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_failure(path: Path | str, error: OSError, resumable: bool) -> Failure:
    """Return the Failure for a file of a run that could not be written.

    resumable: whether the run has a checkpoint.
    """
    remedy = "fix that"
    if error.errno in DISK_FULL:
        remedy = "free some space"
    advice = f"Nothing was saved yet: {remedy}, then start again."
    if resumable:
        advice = f"What was saved is intact: {remedy}, then use --resume."
    elif error.errno == errno.ENOENT:
        advice = "If its folder was moved, put it back and use --resume. If it was deleted, start again."
    return Failure(f"cannot write {path}: {error.strerror or error}. {advice}")


@contextmanager
def atomic_write(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path, then replace `path` by that file. If anything fails, `path` is unchanged.

    previous: new name for an existing file at `path`.
    Raise OSError for a failed write, whichever error a library raised instead. Its filename is `path`.
    """
    partial = _new_name(path)
    partial.touch(exist_ok=False)
    try:
        yield partial
        with partial.open("r+b") as file:  # Windows cannot sync a file that is open for reading
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            _keep(path, previous)
        _replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        cause = find_os_error(error)
        if cause is None or cause.filename not in (None, str(partial)) or isinstance(error, (Failure, UsageError)):
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error
    with suppress(OSError):  # unsupported on Windows and on some network file systems
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def writing(path: Path, remedy: str, parents: bool = False) -> Iterator[Path]:
    """Write a file with `atomic_write`, and raise a Failure that ends with `remedy` for an OSError.

    parents: create the folder first.
    """
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            yield partial
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}. {remedy}") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def _replace(path: Path, target: Path) -> None:
    """Rename a file over another one. On Windows, wait for a virus scanner that reads one of them."""
    end = time.monotonic() + REPLACE_SECONDS
    while True:
        try:
            path.replace(target)
            return
        except PermissionError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)


def _new_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")


def _keep(path: Path, previous: Path) -> None:
    """Add the name `previous` to the file at `path`, by a hard link, so that `path` is never missing."""
    second = _new_name(previous)
    try:
        second.hardlink_to(path)
    except OSError:  # a file system without hard links
        path.replace(previous)
        return
    second.replace(previous)
    second.unlink(missing_ok=True)  # renaming between two names of the same file does nothing


def is_below(path: str | Path, folder: Path = Path()) -> bool:
    """Return whether a path, relative to a folder unless it is absolute, lies in the folder."""
    return (folder / path).resolve().is_relative_to(folder.resolve())


def as_on_disk(path: str, folder: str = "") -> str:
    """Return a path below a folder whose accents have the Unicode form of the disk; the same path without a file."""
    for form in (path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)):
        place = os.path.join(folder, form)  # noqa: PTH118
        if os.path.lexists(place):
            return place
    return os.path.join(folder, path)  # noqa: PTH118


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a contiguous array as a NumPy file, atomically."""
    from numpy.lib import format as npy

    with atomic_write(path) as partial, partial.open("wb") as file:
        # np.save uses `tofile`, whose error on a full disk has no errno.
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)


def display_path(path: Path) -> str:
    """Return a path as the user would type it: relative if it is below the working folder, always with slashes."""
    if path.absolute().is_relative_to(Path.cwd()):
        path = path.absolute().relative_to(Path.cwd())
    return path.as_posix()


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if it is missing or damaged."""
    content: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
    return content
