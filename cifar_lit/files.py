"""Files that are whole or absent: written beside their place, synced to the disk, then renamed.

A folder may come from a stranger who has put links into it. What is written takes a name that nobody can foresee, and that is
not there yet; the renaming replaces a link and does not follow it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cifar_lit.errors import Failure, UsageError

PART = ".cifar-lit-part"  # ends the name of what is being written; no other program gives it, so that leftovers can be removed
MAX_TEXT = 8 << 20  # bytes; of 100,000 classes a metrics.json has 5 MiB
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def find_os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that `error` is or was raised from, None if there is none.

    A failed write inside torch.save is a RuntimeError about file positions; the OSError is in its `__context__`.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_failure(path: Path | str, error: OSError, resumable: bool) -> Failure:
    """Return the Failure for a file of a run that could not be written.

    resumable: whether the run has a checkpoint. A folder that is gone (ENOENT) is taken to have one.
    """
    remedy = "free some space" if error.errno in DISK_FULL else "fix that"
    advice = f"Nothing was saved yet: {remedy}, then start again."
    if resumable or error.errno == errno.ENOENT:
        advice = f"What was saved is intact: {remedy}, then use --resume."
    return Failure(f"cannot write {path}: {error.strerror or error}. {advice}")


@contextmanager
def atomic_write(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path; replace `path` by what was written there, synced to disk, or leave `path` as it was.

    The file has the mode that the umask gives, whatever the library that wrote it set. After the return, a power loss
    does not undo the write. A failed write raises an OSError with the filename `path`, whatever the library raised.

    previous: a second name for the file that `path` was before.
    """
    if path.absolute().parent == Path("/dev"):  # with the rights for it, a device would be replaced
        raise OSError(errno.EINVAL, "it is no place for files", str(path))
    partial = _new_name(path)
    partial.touch(exist_ok=False)
    mode = partial.stat().st_mode
    try:
        yield partial
        if partial.stat().st_mode != mode:
            partial.chmod(mode)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            _keep(path, previous)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, Exception) or isinstance(error, (Failure, UsageError)):
            raise
        cause = find_os_error(error)
        if cause is None or cause.filename not in (None, str(partial)):
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error
    with suppress(OSError):  # Windows opens no folders, and some network file systems sync none
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def writing(path: Path, remedy: str, parents: bool = False) -> Iterator[Path]:
    """`atomic_write`, with the folder made first if `parents`; raises Failure with a remedy where the disk does not take it."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            yield partial
    except BrokenPipeError:  # of standard output, which is written to meanwhile
        raise
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}. {remedy}") from None


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole: readers see the old one or the new one, never a part."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def file_size(path: str | Path, most: int | None = None) -> int:
    """Return the bytes of a file that can be read to its end; raise OSError for any other.

    Reading a pipe waits, a device never ends, and so do files of the kernel such as /proc/kmsg: they are regular files of size 0.

    most: the largest size in bytes; None for any.
    """
    state = os.stat(path)
    if stat.S_ISDIR(state.st_mode):
        raise OSError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    if state.st_size == 0:
        raise OSError(errno.EINVAL, "the file is empty", str(path))
    if most is not None and state.st_size > most:
        raise OSError(errno.EFBIG, f"it is larger than {_size_text(most)}", str(path))
    return state.st_size


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the contents of a file of at most `most` bytes; raise OSError for a file that `file_size` refuses."""
    size = file_size(path, most)
    with open(path, "rb") as file:
        return file.read(size)


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """Return the text of a file in UTF-8; raise what `read_bytes` raises."""
    return read_bytes(path, most).decode()


def _size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _new_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")


def _keep(path: Path, previous: Path) -> None:
    """Makes `path` known as `previous` too, by a second name for the same file, so that at no moment `path` is missing."""
    second = _new_name(previous)
    try:
        second.hardlink_to(path)
    except OSError:  # a file system where a file has one name only
        path.replace(previous)
        return
    second.replace(previous)
    second.unlink(missing_ok=True)  # a rename between two names of the same file does nothing at all
