"""Training batches that are made within a captured step: crop, flip and normalisation become part of its graph.

Outside a graph, the host launches about twenty kernels for them in every step, and copies float32 images into the
graph's input. A deferred batch copies the rows of its images only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

if TYPE_CHECKING:
    from cifar_lit.data.batch import Batch
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.data.loaders import BatchMaker, Pass

Finish = Callable[["Batch", int | None], "Batch"]
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class DeferredBatch:
    """A training batch as a function of its rows. Its other attributes are those of `data.batch.Batch`, made when read.

    Args:
        indices: int64 (B,), rows of the image set.
        loss_weight: see `Batch`.
        maker: the `BatchMaker` of the epoch; it must be on the device of the net.
        finish: function of a batch of the maker and `side`; returns the preprocessed batch.
        side: side of the preprocessed images in pixels, None for full size.
    """

    targets = None  # images are not mixed

    def __init__(
        self, indices: Tensor, loss_weight: float, maker: BatchMaker, finish: Finish, side: int | None
    ) -> None:
        self.indices, self.loss_weight, self.maker = indices, loss_weight, maker
        self.side, self._finish = side, finish

    def make(self) -> Batch:
        """Return a new preprocessed `Batch`."""
        (batch,) = self.maker([(self.indices, self.loss_weight)])
        return self._finish(batch, self.side)

    @cached_property
    def made(self) -> Batch:
        """The preprocessed `Batch` that callbacks see."""
        return replace(self.make(), labels=self.labels)

    @property
    def may_be_changed(self) -> bool:
        """Whether a callback may have changed the images, or has changed the labels in place."""
        return "made" in vars(self) or self.labels._version > 0

    @cached_property
    def labels(self) -> Tensor:
        """The labels, int64 (B,), without making the images. Callbacks read the labels in every step."""
        return self.maker.source.labels.index_select(0, self.indices)

    @property
    def images(self) -> Tensor:
        """The images, float32 (B, C, H, W)."""
        return self.made.images

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            return self.images
        return self.labels

    def __len__(self) -> int:
        return 2

    def with_inputs(self, indices: Tensor, keys: Tensor | None) -> DeferredBatch:
        """Return a new batch that reads its rows, int64 (B,), and the keys of its draws from other tensors."""
        maker = replace(self.maker, keys=keys)
        return DeferredBatch(indices, self.loss_weight, maker, self._finish, self.side)


class DeferredBatches:
    """Make an `ImageData` yield deferred batches in the current fit, until `release`.

    Args:
        data: an ImageData whose training images are on its device.
    """

    def __init__(self, data: ImageData) -> None:
        self._data, self._loader = data, data.train_loader
        self._next_pass, self._transferred = self._loader.next_pass, data.on_after_batch_transfer
        self._loader.next_pass = self._deferred_pass  # type: ignore[method-assign]
        data.on_after_batch_transfer = self._after_transfer  # type: ignore[method-assign, assignment]

    @staticmethod
    def supports(data: ImageData) -> bool:
        """Return whether batches are functions of their rows on the device: not if a hook changes them."""
        hook = getattr(data, "on_after_batch_transfer", None)
        augment = data.augment
        if augment.scale or augment.mixes or augment.transform != "none":
            return False
        if not getattr(hook, "is_function_of_rows", False):
            return False
        for owner in (data, data.trainer.lightning_module):  # type: ignore[union-attr]
            if any(is_overridden(name, owner) for name in TRANSFER_HOOKS):
                return False
        loader = data.train_loader
        return not loader.workers and loader.source.images.device == data.device

    def batch(self, rows: Tensor, weight: float, maker: BatchMaker, side: int | None) -> DeferredBatch:
        """Return a deferred batch of the rows, int64 (B,)."""
        return DeferredBatch(rows, weight, maker, self._data.preprocessing.train_batch, side)

    def _deferred_pass(self) -> Pass:
        current, side = self._next_pass(), self._data.side(self._loader.epoch)

        def make(block: Sequence[tuple[Tensor, float]]) -> list[DeferredBatch]:
            maker = cast("BatchMaker", current.make)
            return [self.batch(rows, weight, maker, side) for rows, weight in block]

        return current._replace(make=make)  # type: ignore[arg-type]

    def _after_transfer(self, batch: Batch | DeferredBatch, dataloader_idx: int) -> Batch | DeferredBatch:
        if isinstance(batch, DeferredBatch):
            return batch
        return self._transferred(batch, dataloader_idx)

    def release(self) -> None:
        """Yield ordinary batches again."""
        for instance, name in ((self._loader, "next_pass"), (self._data, "on_after_batch_transfer")):
            vars(instance).pop(name, None)
