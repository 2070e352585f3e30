"""`SourceSettings`, the settings that `ImageData` passes to a data source."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import as_on_disk
from cifar_lit.data.splits import Split

ImageSize = int | Sequence[int] | str  # 96 for squares, [96, 128] or "96x128" for height and width


def parse_image_size(value: ImageSize) -> tuple[int, int]:
    """Return height and width in pixels. Raise UsageError for an invalid size."""
    sides: Sequence[int | str] | str = [value] if isinstance(value, int) else value
    if isinstance(sides, str):
        sides = re.split("[x×]", sides)
    try:
        sizes = [int(side) for side in sides]
        height, width = sizes * 2 if len(sizes) == 1 else sizes
    except ValueError:
        form = "a number of pixels for squares, or height x width, such as 96x128"
        raise UsageError(f"--data.image_size must be {form}, not {value!r}") from None
    return height, width


def default_cache_dir() -> Path:
    """Return $CIFAR_LIT_CACHE, else $XDG_CACHE_HOME/cifar-lit, else ~/.cache/cifar-lit."""
    if directory := os.environ.get("CIFAR_LIT_CACHE"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cifar-lit"


def parse_levels(levels: Sequence[int] | None) -> tuple[int, int] | None:
    """Return the levels of 16-bit images as a pair. Raise UsageError unless they ascend."""
    if levels is None:
        return None
    black, white = levels
    if black >= white:
        raise UsageError(f"data.levels {list(levels)} must be two values, of black and of white, such as [0, 4095]")
    return black, white


def parse_groups(groups: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the names in `data.groups`, a list or a text with commas."""
    if groups is None:
        return ()
    if isinstance(groups, str):
        groups = groups.split(",")
    return tuple(dict.fromkeys(name.strip() for name in groups))


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Settings of `ImageData` that a data source may read; see `ImageData` for their meaning."""

    root: str | None = None
    url: str | None = None
    image_size: ImageSize | None = None
    channels: int | None = None
    num_classes: int | None = None
    count: int = 10_000
    split: Split = field(default_factory=Split)
    skip_bad: bool = False
    cache_dir: str | None = None
    labels: str | None = None
    resize: str = "crop"
    levels: tuple[int, int] | None = None
    groups: tuple[str, ...] = ()
    # NFC paths of the images that a resumed training began with. Later ones are left out.
    only: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.channels not in (None, 1, 3):
            raise UsageError(f"data.channels must be 1 or 3, not {self.channels}")

    @property
    def path(self) -> Path:
        """The root as a path; `data` if not given."""
        return Path(as_on_disk(str(Path(self.root or "data").expanduser())))

    @property
    def cache_path(self) -> Path:
        """The folder of decoded images, and of features computed from them."""
        folder = Path(self.cache_dir) if self.cache_dir else default_cache_dir()
        return folder.expanduser()
