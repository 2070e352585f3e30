"""Files that are whole or absent: written beside their place, synced to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".cifar-lit-part"  # of what is being written; a name that no other program gives, so that leftovers can be removed


@contextmanager
def atomic_write(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Gives a path to write to; what is there afterwards is synced and takes the place of `path`, or nothing does.

    The file has the mode that the umask gives, whatever the library that wrote it set. Once this has returned, a loss of power
    takes nothing back.

    previous: where the file that `path` was before is kept.
    """
    partial = path.with_name(path.name + PART)
    partial.touch()
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
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # Windows opens no folders, and some network file systems sync none
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole: readers see the old one or the new one, never a part."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _keep(path: Path, previous: Path) -> None:
    """Makes `path` known as `previous` too, by a second name for the same file, so that at no moment `path` is missing."""
    second = previous.with_name(previous.name + PART)
    second.unlink(missing_ok=True)
    try:
        second.hardlink_to(path)
    except OSError:  # a file system where a file has one name only
        path.replace(previous)
        return
    second.replace(previous)
    second.unlink(missing_ok=True)  # a rename between two names of the same file does nothing at all
