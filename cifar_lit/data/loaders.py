"""Loaders over images in memory: whole batches by index, the same images on any number of devices.

They are plain iterables rather than DataLoaders: a batch is two gathers, so there is nothing for workers to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cifar_lit.data.augment import Augmentation, epoch_order, take
from cifar_lit.data.imageset import ImageSet
from cifar_lit.errors import UsageError

PADDING = -1  # the label of an image that only fills a batch up and must not be counted


class Batch(NamedTuple):
    """One device's part of a global batch.

    images: uint8 (B, H, W, C) from a loader, float32 (B, C, H, W) in channels_last memory once on its device.
    labels: int64 (B,), `PADDING` where the image is not to be counted. indices: int64 (B,), rows of the image set.
    share: this part's share of the global batch times the number of devices. Weighting the mean loss with it makes
        the gradient, averaged over devices, that of the mean over the global batch, also when the parts are unequal.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    share: float = 1.0


class TrainLoader:
    """Training batches of one device: order and augmentation are functions of (seed, epoch, image index).

    Every device gets the same number of batches, each its part of the same global batch. The last, smaller batch is
    kept unless it has fewer than two images for each device, which batch norm cannot take. The position in the epoch
    is saved in checkpoints.

    Raises UsageError when a global batch cannot be shared out.
    """

    def __init__(
        self,
        source: ImageSet,
        indices: Tensor,
        batch_size: int,
        augmentation: Augmentation,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        fill: Tensor | None = None,
    ) -> None:
        if batch_size < world:
            raise UsageError(f"batch size {batch_size} is less than one image for each of {world} devices: raise --batch-size")
        if len(indices) < world:
            raise UsageError(f"{len(indices)} training images are too few for {world} devices")
        augmentation.check(source.height, source.width)
        self.source, self.indices, self.batch_size = source, indices, batch_size
        self.augmentation, self.shuffle, self.seed, self.fill = augmentation, shuffle, seed, fill
        self.rank, self.world = rank, world
        self.epoch = 0
        self._position = 0  # batches of this epoch that have been handed out
        self._resume = (-1, 0)

    def __len__(self) -> int:
        full, rest = divmod(len(self.indices), self.batch_size)
        return full + (rest >= 2 * self.world or full == 0)

    @property
    def sampler(self) -> TrainLoader:
        """Where the Trainer looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order and augmentation the next iteration uses."""
        self.epoch = epoch

    def order(self, epoch: int) -> Tensor:
        """Rows of the image set in the order in which an epoch shows them, int64."""
        return self.indices[epoch_order(len(self.indices), self.seed, epoch)] if self.shuffle else self.indices

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its batches have been handed out."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the saved epoch, when it is the next to be iterated, go on after the saved position."""
        self._resume = (state["epoch"], state["position"])

    def __iter__(self) -> Iterator[Batch]:
        # A generator: the Trainer makes the first iterator before it sets the epoch, so that everything has to wait
        # for the first `next`.
        start = self._resume[1] if self._resume[0] == self.epoch else 0
        self._resume = (-1, 0)
        source = self.source
        order = self.order(self.epoch)
        plan = self.augmentation.plan(len(source), source.height, source.width, self.seed, self.epoch)
        for number in range(start, len(self)):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            mine = batch.tensor_split(self.world)[self.rank]
            images = take(source.images, mine, plan, self.augmentation.cutout, self.fill)
            self._position = number + 1
            yield Batch(images, source.labels[mine], mine, share=len(mine) * self.world / len(batch))


class EvalLoader:
    """Batches for validation, test and prediction that hold each image exactly once over all devices.

    The cut into batches does not depend on the number of devices, which take them in turn: so every image is computed
    in the same company, and sums of integers over batches agree to the last digit. Where batches run out, a device
    gets one of padding, which keeps the number of steps equal.
    """

    def __init__(self, source: ImageSet, indices: Tensor, batch_size: int, *, rank: int = 0, world: int = 1) -> None:
        if batch_size < 1:
            raise UsageError("data.eval_batch_size must be at least 1")
        self.source, self.batches = source, list(indices.split(batch_size)) if len(indices) else []
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rank, len(self) * self.world, self.world):
            padding = number >= len(self.batches)
            mine = self.batches[0] if padding else self.batches[number]
            labels = torch.full_like(mine, PADDING) if padding else self.source.labels[mine]
            yield Batch(take(self.source.images, mine, None), labels, mine)
