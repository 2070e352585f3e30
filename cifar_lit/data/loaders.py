"""Loaders over images in memory: whole batches by index, the same images on any number of devices.

They are plain iterables instead of DataLoaders: a batch is indexed from one uint8 tensor in memory, so workers would
have nothing to do. Images that do not fit in memory are read ahead by worker processes, which return the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cifar_lit.data.augment import Augmentation, augment_batch
from cifar_lit.data.batch import PADDING, Batch
from cifar_lit.data.fit_length import count_batches
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.order import Order, shuffled
from cifar_lit.data.read_ahead import read_ahead
from cifar_lit.errors import UsageError

BLOCK_BYTES = 512 * 32 * 32 * 3  # augmented at once; for small batches the launches would cost more than the work

# Batches that are augmented at once: the rows and the loss weight of each.
Block = list[tuple[Tensor, float]]


class Pass(NamedTuple):
    """One pass through training images: the batches from `first` to before `end` of an epoch."""

    first: int
    end: int
    rows: Tensor  # int64 (N,), rows of the image set in the order shown
    make: Callable[[Block], list[Batch]]


@dataclass(eq=False)
class TrainLoader:
    """Training batches of one device. Order and augmentation are functions of (seed, epoch, image).

    Each device gets its part of the same global batches. They do not depend on the number of devices, so a training can
    be resumed on more or fewer. The last, smaller batch is kept unless it is a single image, which batch norm cannot
    take. If it has fewer than two images for each device, fewer devices share it. The others get two of its images,
    with a loss weight of 0.

    Args:
        source: the images.
        indices: int64 (N,), rows of the images to train on.
        batch_size: images of a global batch.
        augmentation: crop, flip and cutout.
        order: returns the rows in the order of an epoch.
        seed: seed of order and augmentation.
        rank: number of this device.
        world: number of devices.
        fill: uint8 (C,), colour of a cutout.
        workers: processes that read and augment images ahead of the training; 0 for images in memory.
        pin_memory: whether workers return page-locked memory.
        weighted: whether the model multiplies its loss by `Batch.loss_weight`. For another model, every batch has
            images for every device: a last batch with fewer than two for each is dropped unless it is the only one.

    Raises:
        UsageError: if a global batch cannot be split across the devices.
    """

    source: ImageSet
    indices: Tensor
    batch_size: int
    augmentation: Augmentation
    _: KW_ONLY
    order: Order = shuffled
    seed: int = 0
    rank: int = 0
    world: int = 1
    fill: Tensor | None = None
    workers: int = 0
    pin_memory: bool = False
    weighted: bool = True

    def __post_init__(self) -> None:
        size, world = self.batch_size, self.world
        if size < world:
            shortage = f"batch size {size} is less than one image for each of {world} devices"
            raise UsageError(f"{shortage}: raise --batch-size")
        if len(self.indices) < world:
            raise UsageError(f"{len(self.indices)} training images are too few for {world} devices")
        self.augmentation.check(*self.source.input_shape[1:])
        self.epoch = 0
        self.position = 0  # batches of this epoch that have been handed out
        self._resume = (-1, 0)
        self._ahead: tuple[int, Any] = (-1, None)  # number and plan of an epoch planned ahead

    def __len__(self) -> int:
        return count_batches(len(self.indices), self.batch_size, 1 if self.weighted else self.world)

    @property
    def sampler(self) -> TrainLoader:
        """Return the loader itself: the Trainer calls `set_epoch` on a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order and augmentation the next iteration uses."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of its batches that have been handed out."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the saved position if the saved epoch is the next to be iterated."""
        self._resume = (state["epoch"], state["position"])

    def __iter__(self) -> Iterator[Batch]:
        # A generator: the Trainer calls `iter` before it sets the epoch, so everything waits for the first `next`.
        epoch, position = self._resume
        self.position = position if epoch == self.epoch else 0
        self._resume = (-1, 0)
        while self.position < len(self):
            yield from self._batches(self.next_pass())

    def next_pass(self) -> Pass:
        """Return the pass that the batch at the current position belongs to."""
        epoch, plan = self._ahead
        return Pass(0, len(self), *(plan if epoch == self.epoch else self.epoch_plan(self.epoch)))

    def _batches(self, current: Pass) -> Iterator[Batch]:
        """Yield this device's batches of a pass, beginning at the current position."""
        batches = current.rows.split(self.batch_size)[self.position - current.first : current.end - current.first]
        parts = [self._part(batch) for batch in batches]
        size = max(1, BLOCK_BYTES // (math.prod(self.source.input_shape) * self.batch_size))
        blocks = [parts[start : start + size] for start in range(0, len(parts), size)]
        ahead = self.workers > 0
        made = read_ahead(blocks, current.make, self.workers, self.pin_memory) if ahead else map(current.make, blocks)
        for block in made:
            for batch in block:
                self.position += 1
                if self.position == len(self):
                    self.plan_next_epoch()
                yield batch

    def plan_next_epoch(self) -> None:
        """Plan the next epoch while the device still computes this one."""
        self._ahead = self.epoch + 1, self.epoch_plan(self.epoch + 1)

    def epoch_plan(self, epoch: int, rows: Tensor | None = None) -> tuple[Tensor, Callable[[Block], list[Batch]]]:
        """Return the rows of an epoch in their order, int64 (N,), and the function that makes batches of them.

        Args:
            epoch: number of the epoch.
            rows: int64 (N,), rows to show; `indices` if not given.
        """
        source, seed = self.source, self.seed
        order = self.order(self.indices if rows is None else rows, seed, epoch)
        _, height, width = source.input_shape
        plan = self.augmentation.plan(len(source), height, width, seed, epoch)
        device = source.images.device
        if device.type != "cpu":
            # One transfer an epoch for each. From page-locked memory, it does not wait for the device's work.
            order = order.pin_memory().to(device, non_blocking=True)
            plan = plan if plan is None else plan.pin_memory().to(device, non_blocking=True)
        cutout = self.augmentation.cutout
        return order, partial(_make_block, source=source, plan=plan, cutout=cutout, fill=self.fill, epoch=epoch)

    def _part(self, batch: Tensor) -> tuple[Tensor, float]:
        """Return this device's rows of a global batch, and their loss weight."""
        devices = self.world
        if self.weighted and len(batch) < self.batch_size:
            devices = min(devices, max(1, len(batch) // 2))
        if self.rank >= devices:
            return batch[:2], 0.0
        part = batch.tensor_split(devices)[self.rank]
        return part, len(part) * self.world / len(batch)


def _make_block(
    block: Block, *, source: ImageSet, plan: Tensor | None, cutout: int, fill: Tensor | None, epoch: int
) -> list[Batch]:
    parts, weights = zip(*block, strict=True)
    rows, sizes = torch.cat(parts), [len(part) for part in parts]
    source.prefetch(rows)
    images = augment_batch(source.images, rows, plan, cutout, fill).split(sizes)
    labels = source.labels.index_select(0, rows).split(sizes)
    columns = zip(images, labels, rows.split(sizes), weights, strict=True)
    return [Batch(*values, epoch=epoch) for values in columns]


@dataclass(eq=False)
class EvalLoader:
    """Batches for validation, test and prediction that hold each image exactly once over all devices.

    The division into batches does not depend on the number of devices, which take them in turn. So every image is
    computed in the same batch, and sums of integers are exact. If batches run out, a device gets a batch of padding.

    Args:
        source: the images.
        indices: int64 (N,), rows of the images to evaluate.
        batch_size: images of a batch.
        rank: number of this device.
        world: number of devices.
        weighted: whether the model ignores images with the label `PADDING`. Another model gets the first batch a second
            time instead, as with torch's DistributedSampler.
    """

    source: ImageSet
    indices: Tensor
    batch_size: int
    _: KW_ONLY
    rank: int = 0
    world: int = 1
    weighted: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError("data.eval_batch_size must be at least 1")
        indices = self.indices.to(self.source.images.device)
        self.batches = list(indices.split(self.batch_size)) if len(indices) else []

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rank, len(self) * self.world, self.world):
            is_surplus = number >= len(self.batches)
            rows = self.batches[0 if is_surplus else number]
            is_padding = is_surplus and self.weighted
            labels = torch.full_like(rows, PADDING) if is_padding else self.source.labels[rows]
            yield Batch(self.source.take(rows), labels, rows)
