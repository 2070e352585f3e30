"""`fetch`: one file from the first of several mirrors that gives it whole, resumed, checked and never half in place."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, url2pathname, urlopen

from filelock import FileLock, Timeout

from cifar_lit.errors import Failure

# ---- Progress of long preparations: a live bar on a terminal, a few plain lines elsewhere.

LINE_EVERY_SECONDS = 10.0


@contextmanager
def progress(
    what: str, total: int, unit: str = "images", scale: float = 1.0, least_seconds: float = 0.0
) -> Iterator[Callable[[int], None]]:
    """Shows how far `what` has come and at which rate; yields `advance(amount)`.

    total and the amounts are counted in `unit`s once multiplied by `scale` (bytes with unit "MB", scale 1e-6);
    a total of 0 means unknown. Writes to stderr. Closing prints one line with amount, seconds and rate, if it took
    at least `least_seconds`.
    """
    started = last_line = time.monotonic()
    done = 0
    bar = None
    task = None
    silent = os.environ.get("LOCAL_RANK", "0") != "0"  # the first of several processes speaks for all
    if sys.stderr.isatty() and not silent:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(what, total=total or None, amount="")
        bar.start()

    def amount() -> str:
        rate = done * scale / max(time.monotonic() - started, 1e-6)
        of = f"/{total * scale:,.0f}" if total else ""
        return f"{done * scale:,.0f}{of} {unit} · {rate:,.{0 if rate >= 100 else 2}f} {unit}/s"

    def advance(count: int) -> None:
        nonlocal done, last_line
        done += count
        if bar is not None and task is not None:
            bar.update(task, completed=done, amount=amount())
        elif not silent and time.monotonic() - last_line >= LINE_EVERY_SECONDS:
            last_line = time.monotonic()
            print(f"{what}: {amount()}", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()
    if not silent and time.monotonic() - started >= least_seconds:
        print(f"{what}: {amount()} · {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


STALL_SECONDS = 20.0  # no connection, or no byte, for so long: the next mirror
ATTEMPTS = 5  # a mirror that breaks off in the middle is taken up again so often before the next one's turn
RETRY_PAUSE = 1.0  # seconds before taking up a broken transfer
MEASURE_SECONDS = 15.0  # the rate is judged over stretches of this length
SLOW_RATE = 150e3  # bytes/s; below it a faster mirror is looked for (CIFAR-10 would take 19 minutes)
CHUNK_BYTES = 1 << 18  # bytes
MAX_DOWNLOAD = 1 << 28  # bytes; of the data sets' archives the largest has 170 MB, and a source could go on for ever


class _Left(Exception):
    """A mirror is left: for which reason, at which rate (bytes/s) if for slowness, and whether it may be taken up again."""

    def __init__(self, reason: str, rate: float = 0.0, again: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.rate, self.again = reason, rate, again


def fetch(name: str, urls: Sequence[str], md5: str, target: Path) -> Path:
    """Returns `target`, downloaded from the first of `urls` that gives a file with that md5, where it is not there already.

    name: what the progress and the failures call the file. urls: http(s), ftp or file URLs, or plain local paths, all of
    byte-identical copies. The transfer goes to `target` + ".part", which the next call takes up where this one broke off;
    several processes may call at once: one downloads, the others wait.

    Raises Failure when a file at `target` has another md5 (it is left as it is), when no mirror gives the file, when the disk
    is full or the folder cannot be written.
    """
    with disk_errors_told(target.parent):
        if not target.exists():
            with download_lock(target):
                if not target.exists():
                    part = target.with_name(target.name + ".part")
                    if not (part.exists() and md5_of(part) == md5):  # ended between the last byte and the renaming
                        _download(name, list(dict.fromkeys(urls)), md5, part, target)
                    with part.open("rb+") as file:
                        os.fsync(file.fileno())
                    part.replace(target)
                    return target
        if not target.is_file() or _size(target) > MAX_DOWNLOAD:  # a pipe would be waited for, a device never end
            wanted = f"a file of at most {MAX_DOWNLOAD >> 20} MiB with md5 {md5}"
            raise Failure(f"{target} is another file: wanted is {wanted}; delete it or replace it")
        found = md5_of(target)
    if found != md5:
        raise Failure(f"{target} is damaged or another file: its md5 is {found}, wanted is {md5}; delete it or replace it")
    return target


def md5_of(path: Path) -> str:
    """The md5 of a file as 32 hexadecimal digits, read in chunks. Raises OSError."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def download_lock(path: Path) -> Iterator[None]:
    """Holds the lock `path` + ".lock" (made with its folder), and says so when another process must be waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process that prepares {path}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors_told(folder: Path, needed: int = 0) -> Iterator[None]:
    """Turns an OSError inside into a Failure naming `folder` and, for a full disk, the bytes that are `needed` (0: unknown)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            more = f"{needed:,} bytes more" if needed else "more space"
            text = f"the disk is full: {folder.absolute()} needs {more}; make room"
        else:
            text = f"{error.filename or folder.absolute()}: {error.strerror or error}; mend that"
        raise Failure(f"{text}, or choose another folder with --data-dir PATH") from error


def _download(name: str, urls: list[str], md5: str, part: Path, target: Path) -> None:
    """Fills `part` from the urls in turn; those that were only slow get a second turn, the fastest first."""
    reasons: dict[str, str] = {}
    slow: dict[str, float] = {}
    waiting = list(urls)
    while waiting or slow:
        if waiting:
            url = waiting.pop(0)
            floor = SLOW_RATE if waiting else max(slow.values(), default=0.0)
        else:
            url = max(slow, key=slow.__getitem__)
            del slow[url]
            floor = 0.0  # nothing faster is known, so it may take its time; this also ends the loop
        try:
            return _load(name, url, md5, part, floor)
        except _Left as left:
            reasons[url] = left.reason
            if left.rate:
                slow[url] = left.rate
            if waiting or slow:
                print(f"{name} from {_host(url)}: {left.reason}; trying another source", file=sys.stderr, flush=True)
    told = "; ".join(f"{_host(url)}: {reason}" for url, reason in reasons.items())
    kept = " What has come is kept, the next start goes on from there." if _size(part) else ""
    raise Failure(
        f"{name} could not be downloaded ({told}). Put it by hand at {target.absolute()} (md5 {md5}), "
        f"or name a source with --data.url; `--recipe quickstart` needs no download.{kept}"
    )


def _load(name: str, url: str, md5: str, part: Path, floor: float) -> None:
    """Fills `part` from one mirror and checks it, taking up broken transfers. Raises _Left."""
    breaks, anew = 0, False
    while True:
        try:
            start = _transfer(name, url, part, floor)
        except _Left as left:
            breaks += 1
            if not left.again or breaks == ATTEMPTS:
                raise
            time.sleep(RETRY_PAUSE)
            continue
        if md5_of(part) == md5:
            return
        part.unlink()
        if anew or not start:
            raise _Left("wrong md5")
        anew = True  # the fault may lie in what was there before: this mirror gets one chance from byte 0


def _transfer(name: str, url: str, part: Path, floor: float) -> int:
    """Copies what is missing in `part` from `url`; returns at which byte it began. Raises _Left, and Failure if writing fails.

    floor: bytes/s; a stretch of MEASURE_SECONDS below it leaves the mirror.
    """
    response, start, total = _open(url, _size(part))
    what = f"{name} from {_host(url)}" + (f", going on after {start / 1e6:,.0f} MB" if start else "")
    missing = max(total - start, 0)
    size = stretch_size = start
    stretch_began = time.monotonic()
    with (
        response,
        disk_errors_told(part.parent, missing),
        part.open("ab" if start else "wb") as file,
        progress(what, missing, unit="MB", scale=1e-6) as advance,
    ):
        while chunk := _read(response, size, total):
            size += len(chunk)
            if size > MAX_DOWNLOAD:
                file.truncate(0)  # no beginning of what is wanted
                raise _Left(f"gives more than {MAX_DOWNLOAD >> 20} MiB")
            file.write(chunk)
            advance(len(chunk))
            if (seconds := time.monotonic() - stretch_began) >= MEASURE_SECONDS:
                rate = (size - stretch_size) / seconds
                if rate < floor:
                    raise _Left(f"slow, {rate / 1e3:,.0f} kB/s", rate=rate)
                stretch_began, stretch_size = time.monotonic(), size
        if size < total:
            raise _Left(f"stopped at {_share(size, total)}", again=True)
    return start


def _open(url: str, start: int) -> tuple[Any, int, int]:
    """Asks for `url` from byte `start` on: the response, the byte that it begins at, and the file's size (0: unknown)."""
    local = "://" not in url
    address = Path(url).expanduser().absolute().as_uri() if local else url
    headers = {"User-Agent": "cifar-lit"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(address, headers=headers), timeout=STALL_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:  # nothing there after `start`: what is here belongs to another file
            return _open(url, 0)
        raise _Left(f"HTTP {error.code}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise _Left(_reason(error)) from error
    if response.headers.get_content_type() == "text/html":  # log-in pages of public networks; they must not replace the part
        response.close()
        raise _Left("a web page instead of the file")
    if getattr(response, "status", None) != 206:  # the server does not know Range, or the file is local
        start = 0
    told = response.headers.get("Content-Length") or ""
    length = int(told) if told.isascii() and told.isdigit() and len(told) < 20 else 0  # a server may send anything
    if start + length > MAX_DOWNLOAD:
        response.close()
        raise _Left(f"claims {start + length:,} bytes")
    return response, start, start + length if length else 0


def _read(response: Any, size: int, total: int) -> bytes:
    """The next bytes of a response, b"" at its end or where it broke off. Raises _Left when none come."""
    try:
        return response.read1(CHUNK_BYTES)  # what has come, without waiting for a full chunk: the rate can be judged
    except TimeoutError as error:
        raise _Left(f"timed out at {_share(size, total)}") from error
    except (OSError, HTTPException) as error:
        raise _Left(f"stopped at {_share(size, total)}", again=True) from error


def _share(size: int, total: int) -> str:
    return f"{100 * size // total} %" if total else f"{size / 1e6:,.1f} MB"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    """The host (and port) that a url names, without a password; the path of a local file."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return url2pathname(parts.path) if parts.scheme == "file" else parts.netloc.rpartition("@")[2]


def _reason(error: Exception) -> str:
    """Why a url could not be opened, in a few words."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return "timed out"
    if isinstance(cause, socket.gaierror):
        return "no network (host not found)"
    if isinstance(cause, (InvalidURL, ValueError)):
        return "not a usable URL"  # the exception's own text would show a password in it
    if isinstance(cause, OSError) and cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
        return "no network"
    text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__
    return " ".join(text.split())
