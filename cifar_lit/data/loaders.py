"""Loaders over images in memory: whole batches by index, the same images on any number of devices.

They are plain iterables rather than DataLoaders: a batch is two gathers, so there is nothing for workers to do. Sets that
do not fit in memory are read by worker processes ahead of the training, which gives the same batches.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cifar_lit.data.augment import Augmentation, augment_batch, balanced_order, epoch_order
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError
from cifar_lit.hardware import return_freed_memory
from cifar_lit.signals import STOP_SIGNALS

PADDING = -1  # the label of an image that only fills a batch up and must not be counted
BLOCK_BYTES = 512 * 32 * 32 * 3  # augmented at once: of small batches, the launches of operations would cost more than their work

Block = list[tuple[Tensor, float]]  # of batches that are augmented at once, the rows and the loss weight of each


@dataclass(eq=False)
class Batch:
    """One device's part of a global batch. It unpacks as `images, labels = batch`.

    Args:
        images: uint8 (B, H, W, C) from a loader, float32 (B, C, H, W) in channels_last memory once on its device.
        labels: int64 (B,), `PADDING` where an image is not to be counted.
        indices: int64 (B,), rows of the image set.
        loss_weight: this part's fraction of the global batch times the number of devices, 0 for a device without a part. With
            it, the gradient averaged over devices is that of the mean over the global batch.
        targets: float32 (B, classes), the share of each class in images mixed from several; else None.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    loss_weight: float = 1.0
    targets: Tensor | None = None

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
        targets = None if self.targets is None else change(self.targets)
        return Batch(change(self.images), change(self.labels), change(self.indices), self.loss_weight, targets)


def count_batches(images: int, batch_size: int, parts: int = 1) -> int:
    """Return the number of training batches of an epoch. A last batch is dropped if it has fewer than 2 images for each part.

    Args:
        images: number of training images.
        batch_size: images of a global batch.
        parts: number of devices that must all get images of every batch.
    """
    full, rest = divmod(images, batch_size)
    return full + (rest >= 2 * parts or full == 0)


class LastLosses:
    """The loss that each training image had when it was last trained on, the same on all devices once it is gathered.

    Attributes:
        latest: float32 (N,), beside the net: what this device's steps have written since the last gathering, -1 elsewhere.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self._known = torch.full((images,), math.inf, device=device)  # until then: the first to be chosen
        self.latest = torch.full_like(self._known, -1.0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `__call__` writes to."""
        return (self.latest,)

    def __call__(self, losses: Tensor, batch: Batch) -> Tensor:
        """Keep the losses (B,) of a training batch, and return them: a loss hook of the model."""
        if batch.loss_weight:
            self.latest[batch.indices] = losses.detach().float()
        return losses

    def merge(self) -> None:
        """Makes what each device has written known to all, which all have to come here for."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.latest, torch.distributed.ReduceOp.MAX)
        self._known = torch.where(self.latest >= 0, self.latest, self._known)
        self.latest.fill_(-1.0)  # in place, as captured steps write there

    def gather(self) -> Tensor:
        """Every image's loss, float32 (N,), on the CPU; all devices have to come here."""
        self.merge()
        return self._known.cpu()

    def restore(self, losses: Tensor) -> None:
        """Takes up what `gather` returned in an earlier part of the training."""
        if losses.shape == self._known.shape:
            self._known.copy_(losses)


@dataclass(eq=False)
class TrainLoader:
    """Training batches of one device: order and augmentation follow from (seed, epoch, image).

    Every device gets its part of the same global batches, which do not depend on the number of devices: a training can be gone on
    with on more or fewer. The last, smaller batch is kept unless it is a single image, which batch norm cannot take. Where it has
    fewer than two for each device, fewer share it, and the others get two of its images with a loss weight of 0.

    balanced: whether an epoch shows each class equally often; of an image that it shows twice, both are augmented alike.
    losses: where the steps write each image's loss. From `skip_from` (an epoch, and a batch in it) on the share `skip_easy` of
        the images is left out whose loss was least: an epoch has as many batches as before, in several rounds through the
        others, each of which is chosen anew and augmented in its own way.
    workers: 0, or how many processes read and augment images that stay in a file, ahead of the training.
    weighted: whether the model multiplies its loss by `Batch.loss_weight`. For another model, a last batch that is too small for
        all devices is dropped.

    Raises UsageError when a global batch cannot be shared out.
    """

    source: ImageSet
    indices: Tensor
    batch_size: int
    augmentation: Augmentation
    _: KW_ONLY
    shuffle: bool = True
    balanced: bool = False
    seed: int = 0
    rank: int = 0
    world: int = 1
    fill: Tensor | None = None
    workers: int = 0
    pin_memory: bool = False
    losses: LastLosses | None = None
    skip_easy: float = 0.0
    skip_from: tuple[int, int] = (0, 0)
    weighted: bool = True

    def __post_init__(self) -> None:
        size, world = self.batch_size, self.world
        if size < world:
            raise UsageError(f"batch size {size} is less than one image for each of {world} devices: raise --batch-size")
        if len(self.indices) < world:
            raise UsageError(f"{len(self.indices)} training images are too few for {world} devices")
        self.augmentation.check(*self.source.input_shape[1:])
        if self.balanced:
            self._labels = self.source.labels.cpu()[self.indices]
        self.epoch = 0
        self.position = 0  # batches of this epoch that have been handed out
        self._resume = (-1, 0)
        self._hard = torch.empty(0, dtype=torch.int64)  # rows of the current round
        self.draw_epoch = 0  # the epoch, or the round as one, whose augmentation the latest batch has
        self._ahead: tuple[int, Any] = (-1, None)  # the plan of a later epoch, with its number

    def __len__(self) -> int:
        return count_batches(len(self.indices), self.batch_size, 1 if self.weighted else self.world)

    @property
    def sampler(self) -> TrainLoader:
        """Where the Trainer looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order and augmentation the next iteration uses."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its batches have been handed out."""
        return {"epoch": self.epoch, "position": self.position}

    def round_state(self) -> dict[str, Tensor]:
        """The losses, where there are any, and the rows of the current round; all devices have to come here."""
        return {"losses": self.losses.gather(), "hard": self._hard} if self.losses else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the saved epoch, when it is the next to be iterated, go on after the saved position, in the saved round."""
        self._resume = (state["epoch"], state["position"])
        losses, hard = state.get("losses"), state.get("hard")
        if not self.losses or not isinstance(losses, Tensor) or not isinstance(hard, Tensor):
            return
        if losses.is_floating_point() and hard.dtype == torch.int64:
            self.losses.restore(losses)
            self._hard = hard[torch.isin(hard, self.indices)]

    def __iter__(self) -> Iterator[Batch]:
        # A generator: the Trainer makes the first iterator before it sets the epoch, so all has to wait for the first `next`.
        self.position = self._resume[1] if self._resume[0] == self.epoch else 0
        self._resume = (-1, 0)
        if self.losses:
            self.losses.merge()  # of the epoch before, in which devices had other images than they will have in this one
        while self.position < len(self):
            yield from self._round()

    def _round(self) -> Iterator[Batch]:
        """The rest of the epoch or, where it goes through some of the images several times, of the current round."""
        self.draw_epoch = self.epoch
        first, end = 0, self._plain_batches(self.epoch)
        if self.position >= end:
            first, end, order, make = self._hard_plan(end)
        else:
            order, make = self._ahead[1] if self._ahead[0] == self.epoch else self.epoch_plan(self.epoch)
        parts = [self._part(batch) for batch in order.split(self.batch_size)[self.position - first : end - first]]
        step = max(1, BLOCK_BYTES // (math.prod(self.source.input_shape) * self.batch_size))
        blocks = [parts[start : start + step] for start in range(0, len(parts), step)]
        for block in read_ahead(blocks, make, self.workers, self.pin_memory) if self.workers else map(make, blocks):
            for batch in block:
                self.position += 1
                if self.position == len(self) and self._plain_batches(self.epoch + 1):  # while a device still has steps to make
                    self._ahead = self.epoch + 1, self.epoch_plan(self.epoch + 1)
                yield batch

    def _plain_batches(self, epoch: int) -> int:
        """How many batches an epoch has before images are left out."""
        if self.losses is None or epoch < self.skip_from[0]:
            return len(self)
        return self.skip_from[1] if epoch == self.skip_from[0] else 0

    def _hard_plan(self, begin: int) -> tuple[int, int, Tensor, Callable[[Block], list[Batch]]]:
        """The batches of the epoch between which the current round is, and its plan; the first round begins at batch `begin`."""
        length = max(1, round((1 - self.skip_easy) * len(self.indices) / self.batch_size))  # batches
        size = min(length * self.batch_size, len(self.indices))
        number, within = divmod(self.position - begin, length)
        rounds = -(-len(self) // length)
        epoch, batch = self.skip_from
        self.draw_epoch = epoch + (batch > 0) + (self.epoch - epoch) * rounds + number  # so that flips alternate
        if not within or len(self._hard) != size:  # of a checkpoint of other images
            rows = self.indices[epoch_order(len(self.indices), self.seed, self.draw_epoch)]  # among equals none comes first
            losses = cast("LastLosses", self.losses).gather()[rows]
            self._hard = rows[losses.argsort(descending=True, stable=True)[:size]]
        first = begin + number * length
        return first, min(first + length, len(self)), *self.epoch_plan(self.draw_epoch, self._hard)

    def epoch_plan(self, epoch: int, rows: Tensor | None = None) -> tuple[Tensor, Callable[[Block], list[Batch]]]:
        """The rows of the image set, int64, in the order in which an epoch shows them, and what makes batches of them.

        rows: of the images to show; all of `indices` if not given.
        """
        images, (_, height, width) = self.source.images, self.source.input_shape
        order, seed = self.indices if rows is None else rows, self.seed
        if self.shuffle:
            order = order[balanced_order(self._labels, seed, epoch) if self.balanced else epoch_order(len(order), seed, epoch)]
        plan = self.augmentation.plan(len(images), height, width, self.seed, epoch)
        if images.device.type != "cpu":  # one transfer an epoch each, which does not wait for what the device is still computing
            order = order.pin_memory().to(images.device, non_blocking=True)
            plan = plan if plan is None else plan.pin_memory().to(images.device, non_blocking=True)
        return order, partial(_make_block, self.source, plan, self.augmentation.cutout, self.fill)

    def _part(self, batch: Tensor) -> tuple[Tensor, float]:
        """This device's rows of a global batch, and their loss weight."""
        # a last batch that is too small for all devices is shared by fewer
        devices = self.world if len(batch) == self.batch_size else min(self.world, max(1, len(batch) // 2))
        if self.rank >= devices:
            return batch[:2], 0.0
        part = batch.tensor_split(devices)[self.rank]
        return part, len(part) * self.world / len(batch)


def _make_block(source: ImageSet, plan: Tensor | None, cutout: int, fill: Tensor | None, block: Block) -> list[Batch]:
    parts, weights = zip(*block, strict=True)
    rows, sizes = torch.cat(parts), [len(part) for part in parts]
    source.announce(rows)
    images = augment_batch(source.images, rows, plan, cutout, fill)
    labels = source.labels.index_select(0, rows)
    return [Batch(*parts) for parts in zip(images.split(sizes), labels.split(sizes), rows.split(sizes), weights, strict=True)]


def read_ahead(
    blocks: list[Block], make: Callable[[Block], list[Batch]], workers: int, pin_memory: bool
) -> Iterator[list[Batch]]:
    """What `make` gives of each block, in their order, made by `workers` processes; in page-locked memory if `pin_memory`.

    Workers are forked where the system can, so that they share the file's pages instead of copying the set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on a machine of one core
        loader = DataLoader(
            cast("Dataset[Block]", blocks),
            batch_size=None,
            num_workers=workers,
            collate_fn=make,
            pin_memory=pin_memory,
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # its seed would be drawn from what dropout draws from
        )
        iterator: Any = iter(loader)
    # Python terminates and awaits what is left of its children at its end; these have to be told in another way.
    atexit.register(iterator._shutdown_workers)
    try:
        yield from iterator
    finally:
        atexit.unregister(iterator._shutdown_workers)


def _start_worker(worker: int) -> None:
    """Ignore the signals that stop the training: they reach the workers too, and the last step needs these."""
    return_freed_memory()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class EvalLoader:
    """Batches for validation, test and prediction that hold each image exactly once over all devices.

    The cut into batches does not depend on the number of devices, which take them in turn: so every image is computed in the same
    company, and sums of integers agree to the last digit. Where batches run out, a device gets one of padding.

    weighted: whether the model ignores images with the label `PADDING`. Another model gets the first batch a second time, as with
        torch's DistributedSampler.
    """

    def __init__(
        self, source: ImageSet, indices: Tensor, batch_size: int, *, rank: int = 0, world: int = 1, weighted: bool = True
    ) -> None:
        if batch_size < 1:
            raise UsageError("data.eval_batch_size must be at least 1")
        indices = indices.to(source.images.device)
        self.source, self.batches = source, list(indices.split(batch_size)) if len(indices) else []
        self.rank, self.world, self.weighted = rank, world, weighted

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rank, len(self) * self.world, self.world):
            surplus = number >= len(self.batches)
            rows = self.batches[0] if surplus else self.batches[number]
            labels = torch.full_like(rows, PADDING) if surplus and self.weighted else self.source.labels[rows]
            yield Batch(self.source.take(rows), labels, rows)
