"""List folders of images without hidden folders and those that systems create."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from cifar_lit.base.text import counted, listed, natural_key

OnError = Callable[[OSError], object]
# Thumbnails, bins and snapshots of Synology, QNAP, Windows, Linux and macOS, in lower case. They repeat photos in
# another size, or keep deleted ones.
SYSTEM_FOLDERS = {
    "@eadir", "@tmp", "@sharebin", "@recycle", "@recently-snapshot", "@__thumb", "#recycle", "#snapshot", "recycler",
    "recycled", "$recycle.bin", "system volume information", "lost+found", "found.000", "__macosx", "__pycache__",
    "thumbs.db", "network trash folder", "temporary items",
}  # fmt: skip


def is_skipped(name: str) -> bool:
    """Return whether a file or folder is hidden, or created by a system."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def visible_entries(
    folder: str, on_error: OnError | None = None, skipped: list[str] | None = None
) -> Iterator[os.DirEntry[str]]:
    """Yield the visible entries of a folder in natural order.

    Args:
        folder: its path.
        on_error: callback with the error of a folder that cannot be read. Without it, the error is raised.
        skipped: list to which the paths of hidden and system folders are added.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: natural_key(entry.name))
    except OSError as error:
        if on_error is None:
            raise
        on_error(error)
        return
    for entry in entries:
        if not is_skipped(entry.name):
            yield entry
        elif skipped is not None and is_folder(entry):
            skipped.append(entry.path)


def walk(
    folder: str,
    on_error: OnError | None = None,
    skipped: list[str] | None = None,
    entered: set[str] | None = None,
) -> Iterator[os.DirEntry[str]]:
    """Yield the visible entries of a folder and of all folders below it, depth first, in natural order.

    Links to folders are followed, but each folder is entered only once: a link to a parent folder would never end. For
    the other arguments, see `visible_entries`.

    entered: real paths of the folders that were entered.
    """
    entered = {os.path.realpath(folder)} if entered is None else entered
    for entry in visible_entries(folder, on_error, skipped):
        if not is_folder(entry):
            yield entry
            continue
        place = os.path.realpath(entry.path)
        if place not in entered:
            entered.add(place)
            yield entry
            yield from walk(entry.path, on_error, skipped, entered)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; False for a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def skipped_text(skipped: Iterable[str]) -> str:
    """Return a line about hidden and system folders that were skipped, by their paths."""
    folders = set(skipped)
    names = sorted({os.path.basename(path) for path in folders})  # noqa: PTH119
    return f"{counted(len(folders), 'hidden or system folder')} skipped ({listed(names)})"
