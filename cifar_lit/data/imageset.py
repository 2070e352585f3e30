"""`ImageSet`: the one currency between sources, loaders and everything after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images, their labels and the class names.

    images: uint8 (N, H, W, C), C = 1 or 3, as decoders give them; may be mapped from a file.
    labels: int64 (N,), values in [0, len(classes)).
    classes: one name a class, in label order.

    Raises ValueError when the parts do not fit together.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(f"images must be uint8 (N, H, W, C), not {self.images.dtype} {tuple(self.images.shape)}")
        if self.images.shape[3] not in (1, 3):
            raise ValueError(f"images must have 1 or 3 channels, not {self.images.shape[3]}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"labels must be int64 ({len(self.images)},), not {self.labels.dtype} {tuple(self.labels.shape)}")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ValueError(f"labels must be in 0 … {len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def height(self) -> int:
        """Rows of pixels of each image."""
        return self.images.shape[1]

    @property
    def width(self) -> int:
        """Pixels in a row."""
        return self.images.shape[2]

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.images.shape[3]
