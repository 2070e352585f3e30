"""`Batch`, one device's part of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PADDING = -1  # label of an image that is not counted
Pair = Sequence[Tensor]  # images and labels of a loader that is not ours


@dataclass(eq=False)
class Batch:
    """One device's part of a global batch. It unpacks as `images, labels = batch`.

    Args:
        images: uint8 (B, H, W, C) from a loader; float32 (B, C, H, W) in channels_last memory after preprocessing.
        labels: int64 (B,), `PADDING` for images that are not counted.
        indices: int64 (B,), rows of the image set; (0,) in a batch of a loader that is not ours.
        loss_weight: this part's fraction of the global batch, times the number of devices; 0 for a device without a
            part. Averaged over devices, the gradients are then the gradient of the global batch's mean loss.
        targets: float32 (B, classes), the share of each class in mixed images; None if images are not mixed.
        epoch: epoch of the augmentation.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    loss_weight: float = 1.0
    targets: Tensor | None = None
    epoch: int = 0

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, index: int) -> Tensor:
        return (self.images, self.labels)[index]

    def __len__(self) -> int:
        return 2

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. Called by Lightning.

        Copies from page-locked memory do not synchronise the device.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory. Called by torch's DataLoader."""
        return self._map(Tensor.pin_memory)

    def clone(self) -> Batch:
        """Return a copy in the same memory format."""
        return self._map(Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = replace(self, images=change(self.images), labels=change(self.labels), indices=change(self.indices))
        if self.targets is not None:
            changed.targets = change(self.targets)
        return changed


def as_batch(batch: Batch | Pair) -> Batch:
    """Return images and labels of any loader as a Batch."""
    if isinstance(batch, Batch):
        return batch
    images, labels = batch
    return Batch(images, labels, labels.new_empty(0))
