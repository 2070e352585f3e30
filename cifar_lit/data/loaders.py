"""Loaders over images in memory: whole batches by index, the same images on any number of devices.

They are plain iterables rather than DataLoaders: a batch is two gathers, so there is nothing for workers to do. Sets that
do not fit in memory go through `data.streaming`, which gives the same batches.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cifar_lit.data.augment import Augmentation, augment_batch, epoch_order
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError

PADDING = -1  # the label of an image that only fills a batch up and must not be counted


class Batch(NamedTuple):
    """One device's part of a global batch.

    images: uint8 (B, H, W, C) from a loader, float32 (B, C, H, W) in channels_last memory once on its device.
    labels: int64 (B,), `PADDING` where the image is not to be counted. indices: int64 (B,), rows of the image set.
    share: this part's share of the global batch times the number of devices. Weighting the mean loss with it makes
        the gradient, averaged over devices, that of the mean over the global batch, also when the parts are unequal.
        0 on a device that has no image of it: what it computes with then counts nowhere.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    share: float = 1.0


class Chunk(NamedTuple):
    """One device's parts of several training batches, one after another in the same tensors.

    images, labels, indices: as in `Batch`, of all of them. sizes: images of each batch; shares: its `Batch.share`.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    sizes: tuple[int, ...]
    shares: tuple[float, ...]

    def batches(self) -> Iterator[Batch]:
        """The batches one by one, as views."""
        if len(self.sizes) == 1:
            yield Batch(self.images, self.labels, self.indices, self.shares[0])
            return
        start = 0
        for size, share in zip(self.sizes, self.shares, strict=True):
            part = slice(start, start + size)
            yield Batch(self.images[part], self.labels[part], self.indices[part], share)
            start += size


def count_batches(images: int, batch_size: int) -> int:
    """Training batches of an epoch, on however many devices; see `TrainLoader` for the last one."""
    full, rest = divmod(images, batch_size)
    return full + (rest >= 2 or full == 0)


class TrainLoader:
    """Training batches of one device, `chunk` of them at a time: order and augmentation follow from (seed, epoch, image).

    Every device gets the same number of batches, each its part of the same global batch, which does not depend on the
    number of devices: a training can be gone on with on more or fewer. The last, smaller batch is kept unless it is a
    single image, which batch norm cannot augment_batch. Where it has fewer than two for each device, fewer devices share it, and
    the others get two of its images with a share of 0. The position in the epoch is saved in checkpoints. Batches are
    made where the images are: on a GPU when `source` has been moved there.

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
        chunk: int = 1,
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
        self.rank, self.world, self.chunk = rank, world, chunk
        self.workers, self.pin_memory = workers, pin_memory
        self.epoch = 0
        self.position = 0  # batches of this epoch that have been handed out
        self._resume = (-1, 0)

    @property
    def batch_count(self) -> int:
        """Batches of an epoch."""
        return count_batches(len(self.indices), self.batch_size)

    def __len__(self) -> int:
        return -(-self.batch_count // self.chunk)

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
        """The epoch, how many of its batches have been handed out, and how many at a time."""
        return {"epoch": self.epoch, "position": self.position, "chunk": self.chunk}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the saved epoch, when it is the next to be iterated, go on after the saved position."""
        self._resume = (state["epoch"], state["position"])

    def __iter__(self) -> Iterator[Chunk]:
        # A generator: the Trainer makes the first iterator before it sets the epoch, so that everything has to wait
        # for the first `next`.
        start = self._resume[1] if self._resume[0] == self.epoch else 0
        self._resume = (-1, 0)
        for chunk in self._chunks(start):
            self.position += len(chunk.sizes)
            yield chunk

    def _chunks(self, start: int) -> Iterator[Chunk]:
        maker = ChunkMaker(self, start)
        self.position = start
        if not self.workers:
            return (maker[number] for number in range(len(maker)))

        return ahead(maker, self.workers, self.pin_memory)


class ChunkMaker:
    """The chunks of one epoch by number, from batch `start` on; all that a worker needs to make them."""

    def __init__(self, loader: TrainLoader, start: int) -> None:
        source = loader.source
        self._source, self._cutout, self._fill = source, loader.augmentation.cutout, loader.fill
        plan = loader.augmentation.plan(len(source), source.height, source.width, loader.seed, loader.epoch)
        parts, self._shares = [], []
        for batch in loader.order(loader.epoch).split(loader.batch_size)[start : loader.batch_count]:
            shared = batch.tensor_split(_devices_for(len(batch), loader))
            counts = loader.rank < len(shared)
            parts.append(shared[loader.rank] if counts else batch[:2])
            self._shares.append(len(parts[-1]) * loader.world / len(batch) if counts else 0.0)
        self._sizes = [len(part) for part in parts]
        self._chunk = loader.chunk
        # one transfer an epoch each, which does not wait for what the device is still computing
        self._plan = plan if plan is None else _beside(plan, source.images)
        self._rows = _beside(torch.cat(parts), source.images) if parts else torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return -(-len(self._sizes) // self._chunk)

    def __getitem__(self, number: int) -> Chunk:
        if not 0 <= number < len(self):
            raise IndexError(number)
        first = number * self._chunk
        sizes = tuple(self._sizes[first : first + self._chunk])
        shares = tuple(self._shares[first : first + self._chunk])
        start = sum(self._sizes[:first])
        rows = self._rows[start : start + sum(sizes)]
        images = augment_batch(self._source.images, rows, self._plan, self._cutout, self._fill)
        return Chunk(images, self._source.labels.index_select(0, rows), rows, sizes, shares)


def _devices_for(images: int, loader: TrainLoader) -> int:
    """How many devices share a global batch of so many images: all, but for a last one that is too small for that."""
    return loader.world if images == loader.batch_size else min(loader.world, max(1, images // 2))


def _beside(values: Tensor, images: Tensor) -> Tensor:
    """`values` where `images` are."""
    if images.device.type == "cpu":
        return values
    return values.pin_memory().to(images.device, non_blocking=True)


class EvalLoader:
    """Batches for validation, test and prediction that hold each image exactly once over all devices.

    The cut into batches does not depend on the number of devices, which augment_batch them in turn: so every image is computed
    in the same company, and sums of integers over batches agree to the last digit. Where batches run out, a device
    gets one of padding, which keeps the number of steps equal.
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
            mine = self.batches[0] if padding else self.batches[number]
            labels = torch.full_like(mine, PADDING) if padding else self.source.labels[mine]
            yield Batch(augment_batch(self.source.images, mine, None), labels, mine)


# ---- Training images that stay in their file: worker processes read and augment chunks ahead of the training.


def ahead(maker: ChunkMaker, workers: int, pin_memory: bool) -> Iterator[Chunk]:
    """The chunks of `maker` in their order, made by `workers` processes; in page-locked memory if `pin_memory`.

    Workers are forked where the system can, so that they share the file's pages instead of copying the set.
    """
    context = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on a machine of one core
        loader = DataLoader(
            cast("Dataset[Chunk]", maker),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            pin_memory=pin_memory,
            multiprocessing_context=context,
            worker_init_fn=_leave_signals_to_the_training,
            generator=torch.Generator(),  # its seed would be drawn from what dropout draws from
        )
        chunks: Any = iter(loader)
    # Python terminates and awaits what is left of its children at its end; these have to be told in another way.
    atexit.register(chunks._shutdown_workers)
    try:
        yield from chunks
    finally:
        atexit.unregister(chunks._shutdown_workers)


def _as_it_is(chunk: Chunk) -> Chunk:
    return chunk


def _leave_signals_to_the_training(worker: int) -> None:
    """A terminal's Ctrl-C reaches the workers too; the training stops in order, and needs them until then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
