"""`fetch`, which downloads a file from the first working mirror, resumes broken transfers, and verifies the md5."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout

from cifar_lit.base.errors import Failure
from cifar_lit.base.files import DISK_FULL
from cifar_lit.base.text import note
from cifar_lit.data.progress import progress

STALL_SECONDS = 20.0  # timeout to connect, and between received bytes
RETRY_PAUSE = 1.0  # seconds before a broken transfer resumes
ATTEMPTS = 10  # per mirror, for transfers that break off
CHUNK_BYTES = 1 << 18


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
        if target.exists():
            digest = _md5_of(target)
            if digest != md5:
                fault = f"damaged or another file: its md5 is {digest}, expected {md5}"
                raise Failure(f"{target} is {fault}; delete it or replace it")
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        _download(name, urls, md5, part, target)
        return part.replace(target)


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
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise an OSError as a Failure that names `folder`."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or folder.absolute()}: {error.strerror or error}; fix that"
        if error.errno in DISK_FULL:
            text = f"the disk is full: free some space in {folder.absolute()}"
        raise Failure(f"{text}, or choose another folder with --data-dir PATH") from error


def _download(name: str, urls: Sequence[str], md5: str, part: Path, target: Path) -> None:
    """Download to `part` from the first of the urls that has the whole file."""
    faults = []
    for number, url in enumerate(urls, 1):
        reason = _download_from(name, url, md5, part)
        if not reason:
            return
        faults.append(f"{_host(url)}: {reason}")
        if number < len(urls):
            note(f"{name} from {faults[-1]}; trying another source")
    hint = " The partial download is kept; the next start resumes it." if _size(part) else ""
    raise Failure(
        f"{name} could not be downloaded ({'; '.join(faults)}). Place it at {target.absolute()} (md5 {md5}), "
        f"or name a source with --data.url; `--recipe quickstart` needs no download.{hint}"
    )


def _download_from(name: str, url: str, md5: str, part: Path) -> str:
    """Download to `part` from one mirror, and verify the md5. Return why it failed; empty if it did not."""
    reason = ""
    for _ in range(ATTEMPTS):
        start = _size(part)
        try:
            _transfer(name, url, part)
        except (OSError, HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)  # a URLError has a reason
            reason = getattr(cause, "strerror", None) or str(error)
            if isinstance(error, HTTPError) and error.code == 416:  # not a part of this file
                part.unlink()
            elif _size(part) == start:  # nothing arrived
                break
            time.sleep(RETRY_PAUSE)
            continue
        if _md5_of(part) == md5:
            return ""
        part.unlink()
        reason = "wrong md5"
        if not start:  # a resumed part may have been damaged before
            break
    return reason


def _transfer(name: str, url: str, part: Path) -> None:
    """Download the rest of `part` from `url`. Raise OSError, HTTPException or ValueError if the source fails."""
    start = _size(part)
    address = url if "://" in url else Path(url).expanduser().absolute().as_uri()
    request = Request(address, headers={"User-Agent": "cifar-lit"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urlopen(request, timeout=STALL_SECONDS) as response:
        if response.headers.get_content_type() == "text/html":  # the log-in page of a public network
            raise OSError("a web page instead of the file")
        if response.status != 206:  # the server does not know Range, or the file is local
            start = 0
        missing = int(response.headers.get("Content-Length", 0))
        with (
            disk_errors(part.parent),
            part.open("ab" if start else "wb") as file,
            progress(f"{name} from {_host(url)}", missing, unit="MB", scale=1e-6) as advance,
        ):
            received = 0
            for chunk in _chunks(response):
                file.write(chunk)
                received += len(chunk)
                advance(len(chunk))
    if received < missing:
        raise OSError(f"stopped at {100 * (start + received) // (start + missing)} %")


def _chunks(response: Any) -> Iterator[bytes]:
    """Yield what arrives until the transfer ends or breaks."""
    with suppress(OSError, HTTPException):
        while chunk := response.read1(CHUNK_BYTES):
            yield chunk


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    """Return the host and port of a URL without a password, or the path of a local file."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or url
