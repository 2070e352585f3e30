"""`Batch`, the form in which images travel from a loader to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PADDING = -1  # label of an image that only fills up a batch and is not counted


@dataclass(eq=False)
class Batch:
    """One device's part of a global batch. It unpacks as `images, labels = batch`.

    Args:
        images: uint8 (B, H, W, C) from a loader, float32 (B, C, H, W) in channels_last memory once on its device.
        labels: int64 (B,), `PADDING` for images that are not counted.
        indices: int64 (B,), rows of the image set.
        loss_weight: this part's fraction of the global batch times the number of devices, 0 for a device without a
            part. With it, the gradient averaged over devices is that of the mean over the global batch.
        targets: float32 (B, classes), the share of each class in images mixed from several; else None.
        epoch: the epoch that the images are augmented for.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    loss_weight: float = 1.0
    targets: Tensor | None = None
    epoch: int = 0

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, place: int) -> Tensor:
        return (self.images, self.labels)[place]

    def __len__(self) -> int:
        return 2

    def to(self, device: torch.device, **settings: Any) -> Batch:
        """Return the batch on a device; `settings` are those of `Tensor.to`. Lightning calls it for each batch."""
        return self._map(lambda tensor: tensor.to(device, **settings))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's DataLoader calls it."""
        return self._map(Tensor.pin_memory)

    def clone(self) -> Batch:
        """Return a copy; channels_last tensors stay so."""
        return self._map(Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        images, labels, indices = change(self.images), change(self.labels), change(self.indices)
        targets = None if self.targets is None else change(self.targets)
        return Batch(images, labels, indices, self.loss_weight, targets, self.epoch)
