"""Training batches that are made within a captured step: crop, flip and normalisation become part of its graph.

Outside a graph, the host launches about twenty kernels for them in every step, and copies float32 images into the
graph's input. A deferred batch copies the rows of its images only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

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

    def __init__(
        self, indices: Tensor, loss_weight: float, maker: Any, finish: Callable[..., Any], side: int | None
    ) -> None:
        self.indices, self.loss_weight, self.maker = indices, loss_weight, maker
        self.side, self._finish = side, finish

    def make(self) -> Any:
        """Return a new preprocessed `Batch`."""
        (batch,) = self.maker([(self.indices, self.loss_weight)])
        return self._finish(batch, self.side)

    @cached_property
    def made(self) -> Any:
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

    @property
    def targets(self) -> None:
        """None: images are not mixed."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __getitem__(self, index: int) -> Tensor:
        return self.images if index == 0 else self.labels

    def __len__(self) -> int:
        return 2

    def to(self, *args: Any, **settings: Any) -> DeferredBatch:
        """Return the batch itself, which is on the device already. Called by Lightning."""
        return self

    def with_inputs(self, indices: Tensor, keys: Tensor | None) -> DeferredBatch:
        """Return a new batch that reads its rows, int64 (B,), and the keys of its draws from other tensors."""
        maker = replace(self.maker, keys=keys)
        return DeferredBatch(indices, self.loss_weight, maker, self._finish, self.side)


class DeferredBatches:
    """Make an `ImageData` yield deferred batches in the current fit, until `release`.

    Args:
        data: an ImageData whose training images are on its device.
    """

    def __init__(self, data: Any) -> None:
        self._data, self._loader = data, data.train_loader
        self._next_pass, self._transferred = self._loader.next_pass, data.on_after_batch_transfer
        self._loader.next_pass, data.on_after_batch_transfer = self._deferred_pass, self._after_transfer

    @staticmethod
    def supports(data: Any) -> bool:
        """Return whether batches are functions of their rows on the device: not if a hook changes them."""
        hook = getattr(data, "on_after_batch_transfer", None)
        if not getattr(hook, "is_function_of_rows", False) or data.augment.computes:
            return False
        owners = (data, data.trainer.lightning_module)
        if any(is_overridden(name, owner) for name in TRANSFER_HOOKS for owner in owners):
            return False
        loader = data.train_loader
        return not loader.workers and loader.source.images.device == data.device

    def batch(self, rows: Tensor, weight: float, maker: Any, side: int | None) -> DeferredBatch:
        """Return a deferred batch of the rows, int64 (B,)."""
        return DeferredBatch(rows, weight, maker, self._data.preprocessing.train_batch, side)

    def _deferred_pass(self) -> Any:
        current, side = self._next_pass(), self._data.side(self._loader.epoch)

        def make(block: Any) -> list[DeferredBatch]:
            return [self.batch(rows, weight, current.make, side) for rows, weight in block]

        return current._replace(make=make)

    def _after_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if isinstance(batch, DeferredBatch) else self._transferred(batch, dataloader_idx)

    def release(self) -> None:
        """Yield ordinary batches again."""
        for instance, name in ((self._loader, "next_pass"), (self._data, "on_after_batch_transfer")):
            vars(instance).pop(name, None)
