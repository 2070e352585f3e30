"""`fetch`, which downloads a file from the first working mirror, resumes broken transfers, and verifies the md5."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener, url2pathname

from filelock import FileLock, Timeout

from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure
from cifar_lit.files import DISK_FULL, file_size
from cifar_lit.text import note

STALL_SECONDS = 20.0  # timeout to connect, and between received bytes
MAX_ATTEMPTS = 5  # per mirror, for transfers that break off
RETRY_PAUSE = 1.0  # seconds before a broken transfer resumes
MEASURE_SECONDS = 15.0  # period over which the rate is measured
SLOW_RATE = 150e3  # bytes/s; below it the next mirror is tried (CIFAR-10 would take 19 minutes)
CHUNK_BYTES = 1 << 18
MAX_DOWNLOAD = 1 << 28  # bytes; the largest archive has 170 MB, but a server may never stop sending
MAX_INTERIM = 10  # "100 Continue" responses


class _MirrorError(Exception):
    """Reason to give up a mirror. `slow`: its rate is too low. `retry`: the transfer may resume from it at once."""

    def __init__(self, reason: str, slow: bool = False, retry: bool = False) -> None:
        super().__init__(reason)
        self.slow, self.retry = slow, retry


def fetch(name: str, urls: Sequence[str], md5: str, target: Path) -> Path:
    """Return `target`. If it does not exist, download it from the first of `urls` whose file has the md5.

    The data is written to `target` + ".part", from which the next call resumes. Callers in several processes must hold
    a `file_lock`. An existing file with another md5 is not changed.

    Args:
        name: name of the file in progress and errors.
        urls: URLs or local paths of byte-identical copies.
        md5: md5 of the file, in hexadecimal.

    Raises:
        Failure: the existing file has another md5, no mirror has the file, or it cannot be written.
    """
    with disk_errors(target.parent):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = _part_of(target)
            if not (part.exists() and _md5_of(part) == md5):  # complete, but not renamed
                _download(name, urls, md5, part, target)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            return part.replace(target)
        try:
            file_size(target, MAX_DOWNLOAD)
        except OSError as error:
            problem = f"another file ({error.strerror}): expected md5 {md5}"
        else:
            digest = _md5_of(target)
            problem = "" if digest == md5 else f"damaged or another file: its md5 is {digest}, expected {md5}"
        if problem:
            raise Failure(f"{target} is {problem}; delete it or replace it")
    return target


def _part_of(target: Path) -> Path:
    """Return the path to download to. Delete a link or hard link there: writing would change another file."""
    part = target.with_name(target.name + ".part")
    with suppress(FileNotFoundError):
        state = part.lstat()
        if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1 or state.st_size > MAX_DOWNLOAD:
            part.unlink()
    return part


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def file_lock(path: Path, work: str, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock at `path`. After `patience` seconds of waiting, note that another process `work`, "decodes …"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        held = lock.acquire(timeout=patience)
    except Timeout:
        note(f"waiting for another process that {work}")
        held = lock.acquire()
    with held:
        yield


@contextmanager
def disk_errors(folder: Path, needed: int = 0) -> Iterator[None]:
    """Raise an OSError as a Failure that names `folder` and, for a full disk, the `needed` bytes (0: unknown)."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or folder.absolute()}: {error.strerror or error}; fix that"
        if error.errno in DISK_FULL:
            space = f"{needed:,} bytes more" if needed else "more space"
            text = f"the disk is full: {folder.absolute()} needs {space}; free some space"
        raise Failure(f"{text}, or choose another folder with --data-dir PATH") from error


def _download(name: str, urls: Sequence[str], md5: str, part: Path, target: Path) -> None:
    """Download to `part` from the urls in turn. Slow mirrors get a second turn without a minimum rate."""
    reasons: dict[str, str] = {}
    turns = [(url, SLOW_RATE if len(urls) > 1 else 0.0) for url in urls]
    for turn, (url, min_rate) in enumerate(turns, 1):
        try:
            return _download_from(name, url, md5, part, min_rate)
        except _MirrorError as error:
            reasons[url] = str(error)
            if error.slow:
                turns.append((url, 0.0))
            if turn < len(turns):
                note(f"{name} from {_host(url)}: {error}; trying another source")
    faults = "; ".join(f"{_host(url)}: {reason}" for url, reason in reasons.items())
    hint = " The partial download is kept; the next start resumes it." if _size(part) else ""
    raise Failure(
        f"{name} could not be downloaded ({faults}). Place it at {target.absolute()} (md5 {md5}), "
        f"or name a source with --data.url; `--recipe quickstart` needs no download.{hint}"
    )


def _download_from(name: str, url: str, md5: str, part: Path, min_rate: float) -> None:
    """Download to `part` from one mirror, resume broken transfers, and verify the md5. Raise _MirrorError."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            start = _transfer(name, url, part, min_rate)
        except _MirrorError as error:
            if not error.retry or attempt == MAX_ATTEMPTS:
                raise
            time.sleep(RETRY_PAUSE)
            continue
        if _md5_of(part) == md5:
            return
        part.unlink()
        if not start:  # A resumed part may have been damaged before. Then try again from byte 0.
            break
    raise _MirrorError("wrong md5")


def _transfer(name: str, url: str, part: Path, min_rate: float) -> int:
    """Download the rest of `part` from `url`. Return the byte it resumed from.

    Raise _MirrorError, also for a rate below `min_rate` (bytes/s) over MEASURE_SECONDS. Raise Failure if writing fails.
    """
    response, start, total = _open(url, _size(part))
    description = f"{name} from {_host(url)}" + (f", resumed at {start / 1e6:,.0f} MB" if start else "")
    missing = max(total - start, 0)
    size = measured_size = start
    measured_from = time.monotonic()

    def position() -> str:
        return f"{100 * size // total} %" if total else f"{size / 1e6:,.1f} MB"

    with (
        response,
        disk_errors(part.parent, missing),
        part.open("ab" if start else "wb") as file,
        progress(description, missing, unit="MB", scale=1e-6) as advance,
    ):
        while True:
            try:
                chunk = response.read1(CHUNK_BYTES)  # does not wait for a full chunk, so that the rate can be measured
            except TimeoutError as error:
                raise _MirrorError(f"timed out at {position()}") from error
            except (OSError, HTTPException) as error:
                raise _MirrorError(f"stopped at {position()}", retry=True) from error
            if not chunk:
                break
            size += len(chunk)
            if size > MAX_DOWNLOAD:
                file.truncate(0)  # not the right file: nothing to resume
                raise _MirrorError(f"gives more than {MAX_DOWNLOAD >> 20} MiB")
            file.write(chunk)
            advance(len(chunk))
            if (seconds := time.monotonic() - measured_from) >= MEASURE_SECONDS:
                rate = (size - measured_size) / seconds
                if rate < min_rate:
                    raise _MirrorError(f"slow, {rate / 1e3:,.0f} kB/s", slow=True)
                measured_from, measured_size = time.monotonic(), size
        if size < total:
            raise _MirrorError(f"stopped at {position()}", retry=True)
    return start


class _Response(HTTPResponse):
    """A response after at most MAX_INTERIM "100 Continue" responses. http.client accepts any number."""

    statuses = 0

    def _read_status(self) -> tuple[str, int, str]:
        self.statuses += 1
        if self.statuses > MAX_INTERIM:
            raise HTTPException("responses without end")
        return super()._read_status()  # type: ignore[misc]


class _Handler(HTTPHandler, HTTPSHandler):
    def do_open(self, http_class: Any, req: Request, **http_conn_args: object) -> HTTPResponse:
        limited: Any = type(http_class.__name__, (http_class,), {"response_class": _Response})
        return super().do_open(limited, req, **http_conn_args)


def _open(url: str, start: int) -> tuple[Any, int, int]:
    """Request `url` from byte `start`. Return the response, its first byte, and the file's size (0 if unknown)."""
    address = url if "://" in url else Path(url).expanduser().absolute().as_uri()
    headers = {"User-Agent": "cifar-lit"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = build_opener(_Handler).open(Request(address, headers=headers), timeout=STALL_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the file ends before `start`, so the part belongs to another file
            return _open(url, 0)
        raise _MirrorError(f"HTTP {error.code}") from error
    except (OSError, HTTPException, ValueError, OverflowError) as error:
        cause = getattr(error, "reason", error)  # a URLError has a reason
        if isinstance(cause, socket.gaierror):
            raise _MirrorError("no network (host not found)") from error
        if isinstance(cause, InvalidURL | ValueError) and not isinstance(cause, OSError):
            raise _MirrorError("not a usable URL") from error  # the exception's text would show a password in the URL
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise _MirrorError(" ".join(reason.split())) from error
    if response.headers.get_content_type() == "text/html":  # the log-in page of a public network
        response.close()
        raise _MirrorError("a web page instead of the file")
    if getattr(response, "status", None) != 206:  # the server does not know Range, or the file is local
        start = 0
    length = getattr(response, "length", None)
    total = start + length if length else 0
    return response, start, total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    """Return the host and port of a URL without a password, or the path of a local file."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return url2pathname(parts.path) if parts.scheme == "file" else parts.netloc.rpartition("@")[2]
