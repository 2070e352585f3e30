"""From a data set's name to its images. A new data set is a function of (settings, train) and its line in `SOURCES`.

One from elsewhere is named by its import path (`my_data.load`), or put into `SOURCES` by the program that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError, nearest
from cifar_lit.plugins import import_callable, is_import_path


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

    @property
    def path(self) -> Path:
        """The root as a path, `data` where there is none."""
        return Path(self.root or "data").expanduser()


@dataclass(frozen=True)
class Source:
    """A data set: how its images come, and what is known of it before they do.

    load: the train (True) or the test images, downloaded, decoded or drawn when they are not there yet.
    at_hand: whether `load` would need no download.
    fixed: settings that this data set has one value of, such as {"image_size": 32}.
    """

    load: Callable[[SourceSettings, bool], ImageSet]
    at_hand: Callable[[SourceSettings], bool] = lambda settings: True
    fixed: Mapping[str, int] = field(default_factory=dict)


def _archive(name: str, files: tuple[str, ...], image_size: int, channels: int, num_classes: int) -> Source:
    """A data set that is downloaded. files: one of these below the root shows that it was."""

    def load(settings: SourceSettings, train: bool) -> ImageSet:
        from cifar_lit.data import archives  # imports torchvision, which the other sources need not wait for

        images: ImageSet = getattr(archives, name)(settings.path, train, (settings.url,) if settings.url else ())
        return images

    def at_hand(settings: SourceSettings) -> bool:
        return any((settings.path / file).exists() for file in files)

    return Source(load, at_hand, {"image_size": image_size, "channels": channels, "num_classes": num_classes})


def _folder(settings: SourceSettings, train: bool) -> ImageSet:
    from cifar_lit.data.folder import folder

    if settings.root is None:
        raise UsageError("the data set `folder` needs --data-dir PATH, which holds train/<class>/… and test/<class>/…")
    images = folder(
        settings.path,
        train,
        image_size=settings.image_size,
        channels=settings.channels or 3,
        test_size=settings.test_size,
        split_seed=settings.split_seed,
        skip_bad=settings.skip_bad,
        cache_dir=Path(settings.cache_dir) if settings.cache_dir else None,
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
    "cifar10": _archive("cifar10", ("cifar-10-batches-py", "cifar-10-python.tar.gz"), 32, 3, 10),
    "cifar100": _archive("cifar100", ("cifar-100-python", "cifar-100-python.tar.gz"), 32, 3, 100),
    "fashion_mnist": _archive("fashion_mnist", ("FashionMNIST/raw",), 28, 1, 10),
    "folder": Source(_folder, at_hand=lambda settings: settings.root is not None and settings.path.exists()),
    "shapes": Source(_shapes),
}


def load_images(dataset: str, settings: SourceSettings, train: bool) -> ImageSet:
    """The train or the test images of a data set, a name in `SOURCES` or an import path of a `Source` or its `load`.

    Raises:
        UsageError: for an unknown name or settings that do not fit.
        Failure: when the images cannot be had.
    """
    source = _source(dataset)
    for name, value in source.fixed.items():
        if getattr(settings, name) not in (None, value):
            raise UsageError(f"data.{name} of {dataset} is {value}, not {getattr(settings, name)}: leave it out")
    images = source.load(settings, train)
    if not isinstance(images, ImageSet):
        raise UsageError(f"{dataset} must return a cifar_lit.data.image_set.ImageSet, not a {type(images).__name__}")
    return images


def at_hand(dataset: str, settings: SourceSettings) -> bool:
    """Whether a data set can be read without a download. Raises UsageError for an unknown name."""
    return _source(dataset).at_hand(settings)


def _source(dataset: str) -> Source:
    if dataset in SOURCES:
        return SOURCES[dataset]
    if is_import_path(dataset):
        target = import_callable(dataset)
        return target if isinstance(target, Source) else Source(target)
    raise UsageError(f"no data set is called {dataset!r}.{nearest(dataset, SOURCES)} There are {', '.join(SOURCES)}.")
