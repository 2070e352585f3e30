"""Loaders over images in memory: whole batches by index, the same images on any number of devices.

They are plain iterables rather than DataLoaders: a batch is two gathers, so there is nothing for workers to do. Sets that
do not fit in memory are read by worker processes ahead of the training, which gives the same batches.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cifar_lit.data.augment import Augmentation, augment_batch, epoch_order
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError

PADDING = -1  # the label of an image that only fills a batch up and must not be counted
BLOCK_IMAGES = 512  # augmented at once: of small batches, the launches of the operations would cost more than their work


class Batch(NamedTuple):
    """One device's part of a global batch.

    images: uint8 (B, H, W, C) from a loader, float32 (B, C, H, W) in channels_last memory once on its device.
    labels: int64 (B,), `PADDING` where the image is not to be counted. indices: int64 (B,), rows of the image set.
    loss_weight: this part's fraction of the global batch times the number of devices. Weighting the mean loss with it makes
        the gradient, averaged over devices, that of the mean over the global batch, also when the parts are unequal.
        0 on a device that has no image of it: what it computes with then counts nowhere.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    loss_weight: float = 1.0


def count_batches(images: int, batch_size: int) -> int:
    """Training batches of an epoch, on however many devices; see `TrainLoader` for the last one."""
    full, rest = divmod(images, batch_size)
    return full + (rest >= 2 or full == 0)


class TrainLoader:
    """Training batches of one device: order and augmentation follow from (seed, epoch, image).

    Every device gets the same number of batches, each its part of the same global batch, which does not depend on the
    number of devices: a training can be gone on with on more or fewer. The last, smaller batch is kept unless it is a
    single image, which batch norm cannot take. Where it has fewer than two for each device, fewer devices share it, and
    the others get two of its images with a loss weight of 0. Batches are made where the images are.

    workers: 0, or how many processes read and augment images that stay in a file, ahead of the training.

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
        workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < world:
            raise UsageError(f"batch size {batch_size} is less than one image for each of {world} devices: raise --batch-size")
        if len(indices) < world:
            raise UsageError(f"{len(indices)} training images are too few for {world} devices")
        augmentation.check(source.height, source.width)
        self.source, self.indices, self.batch_size = source, indices, batch_size
        self.augmentation, self.shuffle, self.seed = augmentation, shuffle, seed
        self.fill = fill if fill is None else fill.to(source.images.device)
        self.rank, self.world = rank, world
        self.workers, self.pin_memory = workers, pin_memory
        self.epoch = 0
        self.position = 0  # batches of this epoch that have been handed out
        self._resume = (-1, 0)

    def __len__(self) -> int:
        return count_batches(len(self.indices), self.batch_size)

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
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the saved epoch, when it is the next to be iterated, go on after the saved position."""
        self._resume = (state["epoch"], state["position"])

    def __iter__(self) -> Iterator[Batch]:
        # A generator: the Trainer makes the first iterator before it sets the epoch, so all has to wait for the first `next`.
        self.position = self._resume[1] if self._resume[0] == self.epoch else 0
        self._resume = (-1, 0)
        blocks = EpochBlocks(self, self.position)
        in_order = read_ahead(blocks, self.workers, self.pin_memory) if self.workers else (blocks[n] for n in range(len(blocks)))
        for block in in_order:
            for batch in block:
                self.position += 1
                yield batch


class EpochBlocks:
    """The batches of one epoch from number `start` on, as many at once as make a block; all that a worker needs to make them."""

    def __init__(self, loader: TrainLoader, start: int) -> None:
        source = loader.source
        self._source, self._cutout, self._fill = source, loader.augmentation.cutout, loader.fill
        plan = loader.augmentation.plan(len(source), source.height, source.width, loader.seed, loader.epoch)
        parts, self._weights = [], []
        for batch in loader.order(loader.epoch).split(loader.batch_size)[start : len(loader)]:
            # a last batch that is too small for all devices is shared by fewer
            devices = loader.world if len(batch) == loader.batch_size else min(loader.world, max(1, len(batch) // 2))
            shared = batch.tensor_split(devices)
            counts = loader.rank < devices
            parts.append(shared[loader.rank] if counts else batch[:2])
            self._weights.append(len(parts[-1]) * loader.world / len(batch) if counts else 0.0)
        self._sizes = [len(part) for part in parts]
        self._batches = max(1, BLOCK_IMAGES // loader.batch_size)
        # one transfer an epoch each, which does not wait for what the device is still computing
        self._plan = plan if plan is None else _to_device_async(plan, source.images)
        self._rows = _to_device_async(torch.cat(parts), source.images) if parts else torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return -(-len(self._sizes) // self._batches)

    def __getitem__(self, number: int) -> list[Batch]:
        first = number * self._batches
        sizes, weights = (values[first : first + self._batches] for values in (self._sizes, self._weights))
        start = sum(self._sizes[:first])
        rows = self._rows[start : start + sum(sizes)]
        images = augment_batch(self._source.images, rows, self._plan, self._cutout, self._fill)
        labels = self._source.labels.index_select(0, rows)
        return [Batch(*parts) for parts in zip(images.split(sizes), labels.split(sizes), rows.split(sizes), weights, strict=True)]


def _to_device_async(values: Tensor, images: Tensor) -> Tensor:
    return values if images.device.type == "cpu" else values.pin_memory().to(images.device, non_blocking=True)


def read_ahead(blocks: EpochBlocks, workers: int, pin_memory: bool) -> Iterator[list[Batch]]:
    """The blocks in their order, made by `workers` processes; in page-locked memory if `pin_memory`.

    Workers are forked where the system can, so that they share the file's pages instead of copying the set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on a machine of one core
        loader = DataLoader(
            cast("Dataset[list[Batch]]", blocks),
            batch_size=None,
            num_workers=workers,
            collate_fn=itemgetter(slice(None)),  # a block is a list of batches already
            pin_memory=pin_memory,
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # its seed would be drawn from what dropout draws from
        )
        iterator: Any = iter(loader)
    # Python terminates and awaits what is left of its children at its end; these have to be told in another way.
    atexit.register(iterator._shutdown_workers)
    try:
        yield from iterator
    finally:
        atexit.unregister(iterator._shutdown_workers)


def _ignore_signals(worker: int) -> None:
    """A terminal's Ctrl-C reaches the workers too; the training stops in order, and needs them until then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class EvalLoader:
    """Batches for validation, test and prediction that hold each image exactly once over all devices.

    The cut into batches does not depend on the number of devices, which take them in turn: so every image is computed in the same
    company, and sums of integers agree to the last digit. Where batches run out, a device gets one of padding.
    """

    def __init__(self, source: ImageSet, indices: Tensor, batch_size: int, *, rank: int = 0, world: int = 1) -> None:
        if batch_size < 1:
            raise UsageError("data.eval_batch_size must be at least 1")
        indices = indices.to(source.images.device)
        self.source, self.batches = source, list(indices.split(batch_size)) if len(indices) else []
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rank, len(self) * self.world, self.world):
            padding = number >= len(self.batches)
            rows = self.batches[0] if padding else self.batches[number]
            labels = torch.full_like(rows, PADDING) if padding else self.source.labels[rows]
            yield Batch(augment_batch(self.source.images, rows, None), labels, rows)
