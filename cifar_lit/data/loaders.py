"""Loaders that index whole batches, the order of their images, and the length of an epoch and of a fit.

Loaders yield the same batches on any number of devices. They are plain iterables, not DataLoaders: a batch is indexed
from one uint8 tensor in memory, which leaves no work for workers. If images do not fit in memory, worker processes
prefetch the same batches.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cifar_lit.base.errors import UsageError
from cifar_lit.base.memory import return_freed_memory
from cifar_lit.base.signals import ignore_stop_signals
from cifar_lit.data.augment import Augment
from cifar_lit.data.image_set import PADDING, Batch, ImageSet

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ORDER = 1  # number of this random stream; 0 is the stream of a feature

Order = Callable[[Tensor, int, int], Tensor]  # from rows, seed and epoch to the rows in order


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of `count` image indices, int64 (count,), as a function of (seed, epoch)."""
    return torch.from_numpy(np.random.default_rng([_ORDER, seed, epoch]).permutation(count))


def shuffled(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows, int64 (N,), in a new random order for each epoch."""
    return rows[epoch_order(len(rows), seed, epoch)]


def in_order(rows: Tensor, seed: int, epoch: int) -> Tensor:
    """Return rows unchanged."""
    return rows


def count_batches(images: int, batch_size: int, parts: int = 1) -> int:
    """Return the number of training batches of an epoch.

    A last batch with fewer than 2 images per part is dropped, unless it is the only batch. parts: number of devices
    that each need images of every batch.
    """
    full, remaining = divmod(images, batch_size)
    if full == 0 or remaining >= 2 * parts:
        return full + 1
    return full


class FitLength(NamedTuple):
    """Number of batches of an epoch, at least 1, and of the whole fit, None if unlimited."""

    epoch: int
    total: int | None

    @property
    def epochs(self) -> int | None:
        """Number of epochs, the last one possibly incomplete; None if unlimited."""
        if self.total is None:
            return None
        return math.ceil(self.total / self.epoch)


def fit_length(trainer: Trainer | None, batches: int) -> FitLength:
    """Return the length of a fit from the Trainer's limits of batches, epochs and steps; no Trainer, no limits."""
    if trainer is None:
        return FitLength(max(1, batches), None)
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        epoch = max(1, min(batches, limit))
    else:
        epoch = max(1, int(limit * batches))
    limits = []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        limits.append(epoch * trainer.max_epochs)
    if trainer.max_steps > 0:
        accumulated = trainer.accumulate_grad_batches  # the last step of an epoch may have fewer
        epochs, steps = divmod(trainer.max_steps, math.ceil(epoch / accumulated))
        limits.append(epochs * epoch + min(epoch, steps * accumulated))
    return FitLength(epoch, min(limits, default=None))


# Small batches are augmented in blocks of this size. For single batches, launching the kernels would take longest.
BLOCK_BYTES = 512 * 32 * 32 * 3

Block = list[tuple[Tensor, float]]  # rows and loss weight of each batch


class Pass(NamedTuple):
    """Batches `first` to `end - 1` of an epoch."""

    first: int
    end: int
    rows: Tensor  # int64 (N,), rows of the image set, in order
    make: Callable[[Block], list[Batch]]


@dataclass(eq=False)
class TrainLoader:
    """Training batches of one rank. Order and augmentation are functions of (seed, epoch, image).

    Each rank gets its part of the same global batches. The global batches do not depend on the number of devices, so a
    training can be resumed on more or fewer devices. A smaller last batch is kept unless it is a single image, because
    batch norm needs two. A last batch of fewer than two images per device is shared by fewer devices. Each other device
    gets two of its images with a loss weight of 0.

    Raises:
        UsageError: if a global batch cannot be split across the devices.
    """

    source: ImageSet
    indices: Tensor  # int64 (N,), rows of the training images
    batch_size: int  # images per global batch
    augment: Augment  # the loader applies `flip`, `crop` and `cutout`
    fill: Tensor  # uint8 (C,), colour of a cutout
    _: KW_ONLY
    order: Order = shuffled
    seed: int = 0  # decides order and augmentation
    rank: int = 0
    world: int = 1  # number of devices
    workers: int = 0  # processes that prefetch batches; 0 for images in memory
    pin_memory: bool = False  # whether workers return page-locked memory
    # Whether the model multiplies its loss by `Batch.loss_weight`. Otherwise a last batch with fewer than two images
    # per device is dropped, unless it is the only batch.
    weighted: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < self.world:
            fault = f"batch size {self.batch_size} is less than one image for each of {self.world} devices"
            raise UsageError(f"{fault}: raise --batch-size")
        self.augment.check(*self.source.input_shape[1:])
        self.epoch = 0
        self.position = 0  # batches of this epoch yielded so far
        self._resume = (-1, 0)  # epoch and position

    def __len__(self) -> int:
        parts = self.world
        if self.weighted:
            parts = 1
        return count_batches(len(self.indices), self.batch_size, parts)

    @property
    def sampler(self) -> TrainLoader:
        """The loader itself. The Trainer calls `set_epoch` on a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, object]:
        """Return the epoch and the number of its batches yielded so far."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the saved position if the next iteration is of the saved epoch."""
        self._resume = (state["epoch"], state["position"])

    def __iter__(self) -> Iterator[Batch]:
        # The Trainer calls `iter` before `set_epoch`. This body first runs at the first `next`, when `epoch` is set.
        epoch, position = self._resume
        self.position = 0
        if epoch == self.epoch:
            self.position = position
        self._resume = (-1, 0)
        while self.position < len(self):
            yield from self._batches(self.next_pass())

    def next_pass(self) -> Pass:
        """Return the pass that contains the current position."""
        return Pass(first=0, end=len(self), rows=self.epoch_rows(self.epoch), make=self.maker(self.epoch))

    def _batches(self, current: Pass) -> Iterator[Batch]:
        """Yield this rank's batches of a pass, from the current position on."""
        start, end = self.position - current.first, current.end - current.first  # numbers within the pass
        parts = [self._part(batch) for batch in current.rows.split(self.batch_size)[start:end]]
        length = max(1, BLOCK_BYTES // (math.prod(self.source.input_shape) * self.batch_size))  # batches of a block
        blocks = [parts[first : first + length] for first in range(0, len(parts), length)]
        batches_of_blocks: Iterable[list[Batch]] = map(current.make, blocks)
        if self.workers:
            batches_of_blocks = read_ahead(blocks, current.make, self.workers, self.pin_memory)
        for batch in chain.from_iterable(batches_of_blocks):
            self.position += 1
            yield batch

    def epoch_rows(self, epoch: int, rows: Tensor | None = None) -> Tensor:
        """Return `rows`, int64 (N,), in the order of an epoch, on the device of the images. Default: `indices`."""
        if rows is None:
            rows = self.indices
        return self._placed(self.order(rows, self.seed, epoch))

    def maker(self, epoch: int) -> BatchMaker:
        """Return the function that turns rows into the batches of an epoch."""
        _, height, width = self.source.input_shape
        keys = self.augment.move_keys(height, width, self.seed, epoch)
        if keys is not None:
            keys = self._placed(keys)
        return BatchMaker(self.source, self.augment, keys, self.fill, epoch)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of the images. From page-locked memory, it does not wait for the device."""
        device = self.source.images.device
        if device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    def _part(self, batch: Tensor) -> tuple[Tensor, float]:
        """Return this rank's rows of a global batch and their loss weight."""
        sharing = self.world  # devices that get a part, of at least two images
        if self.weighted and len(batch) < self.batch_size:
            sharing = min(self.world, max(1, len(batch) // 2))
        if self.rank >= sharing:
            return batch[:2], 0.0
        part = batch.tensor_split(sharing)[self.rank]
        return part, len(part) * self.world / len(batch)


@dataclass(frozen=True)
class BatchMaker:
    """Function from a block to its batches, for one epoch. Arguments: see `Augment.move` and `Batch`."""

    source: ImageSet
    augment: Augment
    keys: Tensor | None
    fill: Tensor
    epoch: int

    def __call__(self, block: Block) -> list[Batch]:
        """Return the batches of a block."""
        parts, weights = zip(*block, strict=True)
        rows = torch.cat(parts)
        sizes = [len(part) for part in parts]
        self.source.prefetch(rows)
        images = self.augment.move(self.source.images, rows, self.keys, self.fill).split(sizes)
        labels = self.source.labels.index_select(0, rows).split(sizes)
        columns = zip(images, labels, rows.split(sizes), weights, strict=True)
        return [Batch(*values, epoch=self.epoch) for values in columns]


@dataclass(eq=False)
class EvalLoader:
    """Batches for validation, test and prediction. They hold each image exactly once over all devices.

    The batches do not depend on the number of devices. Rank r takes batch r, r + world, and so on. If no batch is left
    for a rank, it gets a batch of padding.
    """

    source: ImageSet
    indices: Tensor  # int64 (N,), rows of the images to evaluate
    batch_size: int
    _: KW_ONLY
    rank: int = 0
    world: int = 1  # number of devices
    # Whether the model ignores images with the label `PADDING`. Otherwise the first batch is repeated instead of
    # padding, as in torch's DistributedSampler.
    weighted: bool = True

    def __post_init__(self) -> None:
        self.batches: list[Tensor] = []
        if len(self.indices):
            self.batches = list(self.indices.to(self.source.images.device).split(self.batch_size))

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rank, len(self) * self.world, self.world):
            if number < len(self.batches):
                rows = self.batches[number]
                labels = self.source.labels[rows]
            else:  # no batch is left for this rank
                rows = self.batches[0]
                labels = self.source.labels[rows]
                if self.weighted:
                    labels = torch.full_like(labels, PADDING)
            yield Batch(self.source.take(rows), labels, rows)


Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    items: Sequence[Item], make: Callable[[Item], Result], workers: int, pin_memory: bool
) -> Iterator[Result]:
    """Yield `make(item)` for each item, in order, computed by worker processes.

    `make` must be picklable. Workers are forked if the system supports it, so that they share the pages of a
    memory-mapped file. pin_memory: whether to return page-locked memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on a machine with one core
        loader: Any = DataLoader(
            items,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            collate_fn=make,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
            worker_init_fn=_start_worker,
            # Without a generator, the loader would draw its seed from torch's global generator.
            generator=torch.Generator(),
        )
        iterator = iter(loader)
    # At exit, Python sends SIGTERM to its children and joins them. Workers ignore it, so shut them down first.
    atexit.register(iterator._shutdown_workers)
    try:
        yield from iterator
    finally:
        atexit.unregister(iterator._shutdown_workers)


def _start_worker(worker: int) -> None:
    """Set up a worker. It ignores stop signals, because the last training step still needs its batches."""
    return_freed_memory()
    ignore_stop_signals()
