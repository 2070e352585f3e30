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

    previous: where the file that `path` was before is kept. Once this has returned, a loss of power takes nothing back.
    """
    partial = path.with_name(path.name + PART)
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        if previous is not None:
            _keep(path, previous)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _keep(path: Path, previous: Path) -> None:
    """Makes `path` known as `previous` too, by a second name for the same file, so that at no moment `path` is missing."""
    if not path.exists():
        return
    second = previous.with_name(previous.name + PART)
    second.unlink(missing_ok=True)
    try:
        second.hardlink_to(path)
    except OSError:  # a file system where a file has one name only
        path.replace(previous)
        return
    second.replace(previous)
    second.unlink(missing_ok=True)  # a rename between two names of the same file does nothing at all


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system can."""
    with suppress(OSError):  # Windows opens no folders, and some network file systems sync none
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_partial_files(folder: Path) -> list[Path]:
    """Removes what killed processes left half written in and below `folder`; nobody may be writing there."""
    found = sorted(folder.rglob(f"*{PART}"))
    for part in found:
        part.unlink(missing_ok=True)
    return found
