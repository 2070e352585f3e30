"""`fetch`: one file from the first of several mirrors that gives it whole, resumed, checked and never half in place."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from math import inf
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener, url2pathname

from filelock import FileLock, Timeout

from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure
from cifar_lit.files import file_size
from cifar_lit.text import note

STALL_SECONDS = 20.0  # no connection, or no byte, for so long: the next mirror
MAX_ATTEMPTS = 5  # times that a mirror is asked which breaks off in the middle, before the next one's turn
RETRY_PAUSE = 1.0  # seconds before going on with a broken transfer
MEASURE_SECONDS = 15.0  # the rate is judged over stretches of this length
SLOW_RATE = 150e3  # bytes/s; below it a faster mirror is looked for (CIFAR-10 would take 19 minutes)
CHUNK_BYTES = 1 << 18
MAX_DOWNLOAD = 1 << 28  # bytes; of the data sets' archives the largest has 170 MB, and a source could go on for ever
MAX_INTERIM = 10  # answers before the answer


class _MirrorError(Exception):
    """Why a mirror is left, at which rate (bytes/s) if for slowness, and whether the transfer may go on from it."""

    def __init__(self, reason: str, rate: float = 0.0, retry: bool = False) -> None:
        super().__init__(reason)
        self.rate, self.retry = rate, retry


def fetch(name: str, urls: Sequence[str], md5: str, target: Path) -> Path:
    """Returns `target`, downloaded from the first of `urls` that gives a file with that md5, where it is not there already.

    The transfer goes to `target` + ".part", which the next call continues where this one broke off. Processes that could want
    the file at once hold a `file_lock`. A file at `target` with another md5 is left as it is.

    name: what the progress and the failures call the file. urls: of byte-identical copies, also plain local paths.

    Raises Failure when the file at `target` is another, no mirror gives it, or the disk does not take it.
    """
    with disk_errors(target.parent):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = _part_of(target)
            if not (part.exists() and _md5_of(part) == md5):  # ended between the last byte and the renaming
                _download(name, urls, md5, part, target)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            return part.replace(target)
        try:
            file_size(target, MAX_DOWNLOAD)
        except OSError as error:
            problem = f"another file ({error.strerror}): wanted is one with md5 {md5}"
        else:
            digest = _md5_of(target)
            problem = "" if digest == md5 else f"damaged or another file: its md5 is {digest}, wanted is {md5}"
        if problem:
            raise Failure(f"{target} is {problem}; delete it or replace it")
    return target


def _part_of(target: Path) -> Path:
    """Where the transfer goes. What cannot be ours makes way: a link or another file's second name would be written through."""
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
    """Holds a lock at `path` (made with its folder); says that another process does `work` after `patience` seconds."""
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
    """Turns an OSError inside into a Failure naming `folder` and, for a full disk, the bytes that are `needed` (0: unknown)."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or folder.absolute()}: {error.strerror or error}; mend that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"the disk is full: {folder.absolute()} needs {f'{needed:,} bytes more' if needed else 'more space'}; make room"
        raise Failure(f"{text}, or choose another folder with --data-dir PATH") from error


def _download(name: str, urls: Sequence[str], md5: str, part: Path, target: Path) -> None:
    """Fills `part` from the urls in turn; those that were only slow get a second turn, the fastest first."""
    reasons: dict[str, str] = {}
    rates = dict.fromkeys(urls, inf)  # bytes/s of each url that is still to be tried; inf where nothing is known
    while rates:
        url = max(rates, key=rates.__getitem__)
        untried = rates.pop(url) == inf
        # at its second turn a mirror may take its time: nothing faster is known
        min_rate = min(SLOW_RATE, max(rates.values(), default=0.0)) if untried else 0.0
        try:
            return _download_from(name, url, md5, part, min_rate)
        except _MirrorError as error:
            reasons[url] = str(error)
            if error.rate:
                rates[url] = error.rate
            if rates:
                note(f"{name} from {_host(url)}: {error}; trying another source")
    listed = "; ".join(f"{_host(url)}: {reason}" for url, reason in reasons.items())
    kept = " What has come is kept, the next start goes on from there." if _size(part) else ""
    raise Failure(
        f"{name} could not be downloaded ({listed}). Put it by hand at {target.absolute()} (md5 {md5}), "
        f"or name a source with --data.url; `--recipe quickstart` needs no download.{kept}"
    )


def _download_from(name: str, url: str, md5: str, part: Path, min_rate: float) -> None:
    """Fills `part` from one mirror and checks it, resuming broken transfers. Raises _MirrorError."""
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
        if not start:  # else the fault may lie in what was there before: once more from byte 0
            break
    raise _MirrorError("wrong md5")


def _transfer(name: str, url: str, part: Path, min_rate: float) -> int:
    """Copies what is missing in `part` from `url`; returns at which byte it began.

    min_rate: bytes/s; a stretch of MEASURE_SECONDS below it leaves the mirror. Raises _MirrorError, and Failure if writing fails.
    """
    response, start, total = _open(url, _size(part))
    what = f"{name} from {_host(url)}" + (f", going on after {start / 1e6:,.0f} MB" if start else "")
    missing = max(total - start, 0)
    size = stretch_size = start
    stretch_began = time.monotonic()

    def position() -> str:
        return f"{100 * size // total} %" if total else f"{size / 1e6:,.1f} MB"

    with (
        response,
        disk_errors(part.parent, missing),
        part.open("ab" if start else "wb") as file,
        progress(what, missing, unit="MB", scale=1e-6) as advance,
    ):
        while True:
            try:
                chunk = response.read1(
                    CHUNK_BYTES
                )  # what has come, not waiting for a full chunk: the rate can be judged
            except TimeoutError as error:
                raise _MirrorError(f"timed out at {position()}") from error
            except (OSError, HTTPException) as error:
                raise _MirrorError(f"stopped at {position()}", retry=True) from error
            if not chunk:
                break
            size += len(chunk)
            if size > MAX_DOWNLOAD:
                file.truncate(0)  # no beginning of the right file
                raise _MirrorError(f"gives more than {MAX_DOWNLOAD >> 20} MiB")
            file.write(chunk)
            advance(len(chunk))
            if (seconds := time.monotonic() - stretch_began) >= MEASURE_SECONDS:
                rate = (size - stretch_size) / seconds
                if rate < min_rate:
                    raise _MirrorError(f"slow, {rate / 1e3:,.0f} kB/s", rate=rate)
                stretch_began, stretch_size = time.monotonic(), size
        if size < total:
            raise _MirrorError(f"stopped at {position()}", retry=True)
    return start


class _Response(HTTPResponse):
    """A response after at most MAX_INTERIM answers "100 Continue"; http.client reads them without end."""

    statuses = 0

    def _read_status(self) -> tuple[str, int, str]:
        self.statuses += 1
        if self.statuses > MAX_INTERIM:
            raise HTTPException("announces an answer without end")
        return super()._read_status()  # type: ignore[misc]


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Handler(HTTPHandler, HTTPSHandler):
    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_Connection, request)

    def https_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, request)


def _open(url: str, start: int) -> tuple[Any, int, int]:
    """Asks for `url` from byte `start` on: the response, the byte that it begins at, and the file's size (0: unknown)."""
    address = url if "://" in url else Path(url).expanduser().absolute().as_uri()
    headers = {"User-Agent": "cifar-lit"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = build_opener(_Handler).open(Request(address, headers=headers), timeout=STALL_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:  # nothing there after `start`: what is here belongs to another file
            return _open(url, 0)
        raise _MirrorError(f"HTTP {error.code}") from error
    except (OSError, HTTPException, ValueError, OverflowError) as error:
        cause = getattr(error, "reason", error)  # of a URLError
        if isinstance(cause, socket.gaierror):
            raise _MirrorError("no network (host not found)") from error
        if isinstance(cause, InvalidURL | ValueError) and not isinstance(cause, OSError):
            raise _MirrorError("not a usable URL") from error  # the exception's own text would show a password in it
        raise _MirrorError(
            " ".join((getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).split())
        ) from error
    if (
        response.headers.get_content_type() == "text/html"
    ):  # log-in pages of public networks; they must not replace the part
        response.close()
        raise _MirrorError("a web page instead of the file")
    if getattr(response, "status", None) != 206:  # the server does not know Range, or the file is local
        start = 0
    length = getattr(response, "length", None) or 0
    return response, start, start + length if length else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    """The host (and port) that a url names, without a password; the path of a local file."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return url2pathname(parts.path) if parts.scheme == "file" else parts.netloc.rpartition("@")[2]
