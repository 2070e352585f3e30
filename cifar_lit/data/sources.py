"""The table from a data set's name to the function that returns its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError, nearest


@dataclass(frozen=True)
class SourceSettings:
    """What a source may look at; see `ImageData` for the meaning of each."""

    root: str | None = None
    url: str | None = None
    image_size: int | None = None
    channels: int | None = None
    num_classes: int | None = None
    count: int = 10_000
    test_size: float = 0.2
    split_seed: int = 0
    skip_bad: bool = False
    cache_dir: str | None = None


Source = Callable[[SourceSettings, bool], ImageSet]


def _archive(name: str) -> Source:
    def source(settings: SourceSettings, train: bool) -> ImageSet:
        from cifar_lit.data import archives

        root = Path(settings.root or "data").expanduser()
        images: ImageSet = getattr(archives, name)(root, train, (settings.url,) if settings.url else ())
        own = {"image_size": images.height, "channels": images.channels, "num_classes": len(images.classes)}
        for key, value in own.items():
            if getattr(settings, key) not in (None, value):
                raise UsageError(f"data.{key} of {name} is {value}, not {getattr(settings, key)}: leave it out")
        return images

    return source


def _folder(settings: SourceSettings, train: bool) -> ImageSet:
    from cifar_lit.data.folder import folder

    if settings.root is None:
        raise UsageError("the data set `folder` needs --data-dir PATH, which holds train/<class>/… and test/<class>/…")
    images = folder(
        Path(settings.root).expanduser(),
        train,
        image_size=settings.image_size,
        channels=settings.channels or 3,
        test_size=settings.test_size,
        split_seed=settings.split_seed,
        skip_bad=settings.skip_bad,
        cache_dir=Path(settings.cache_dir).expanduser() if settings.cache_dir else None,
    )
    if settings.num_classes not in (None, len(images.classes)):
        raise UsageError(
            f"{settings.root} has {len(images.classes)} classes, not {settings.num_classes}: leave data.num_classes out"
        )
    return images


def _shapes(settings: SourceSettings, train: bool) -> ImageSet:
    from cifar_lit.data.shapes import shapes

    if settings.count < 10:
        raise UsageError("data.count must be at least 10 images")
    return shapes(
        train,
        image_size=settings.image_size or 32,
        channels=settings.channels or 3,
        num_classes=settings.num_classes or 10,
        count=settings.count if train else settings.count // 5,
        seed=settings.split_seed,
    )


SOURCES: dict[str, Source] = {
    "cifar10": _archive("cifar10"),
    "cifar100": _archive("cifar100"),
    "fashion_mnist": _archive("fashion_mnist"),
    "folder": _folder,
    "shapes": _shapes,
}


def load_images(dataset: str, settings: SourceSettings, train: bool) -> ImageSet:
    """The train or the test images of a data set, downloaded, decoded or drawn when they are not there yet.

    Raises UsageError for an unknown name or settings that do not fit, Failure when they cannot be had.
    """
    if dataset not in SOURCES:
        raise UsageError(f"no data set is called {dataset!r}.{nearest(dataset, SOURCES)} There are {', '.join(SOURCES)}.")
    return SOURCES[dataset](settings, train)
