"""`data.skip_easy`: late in the training, skip the images with the lowest loss.

An epoch keeps its number of batches, but consists of several rounds through the hard images. Each round selects them
again, by the last training loss of every image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from cifar_lit.data.batch import Batch
from cifar_lit.data.fit_length import FitLength
from cifar_lit.data.loaders import Pass, TrainLoader
from cifar_lit.data.order import shuffled
from cifar_lit.errors import UsageError


def check_skipping(skip_easy: float, skip_from: float, *, sampling: str, shuffle: bool) -> None:
    """Raise UsageError for invalid settings."""
    if not 0 <= skip_easy < 1:
        raise UsageError(f"data.skip_easy is a share of the images, from 0 to below 1, not {skip_easy:g}")
    if not 0 <= skip_from <= 1:
        raise UsageError(f"data.skip_from is a share of the steps, from 0 to 1, not {skip_from:g}")
    if skip_easy and (sampling != "none" or not shuffle):
        raise UsageError("data.skip_easy sets the order of images: leave data.sampling none and data.shuffle true")


def first_hard_batch(skip_from: float, length: FitLength) -> tuple[int, int]:
    """Return the epoch, and the batch in it, from which easy images are skipped."""
    if length.total is None:
        raise UsageError("data.skip_from needs the length of the training: set --epochs or --trainer.max_steps")
    return divmod(round(skip_from * length.total), length.epoch)


class LastLosses:
    """The last training loss of each image, equal on all devices after `gather`.

    Attributes:
        latest: float32 (N,) on the device of the net: losses since the last `merge`, -1 for other images.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self._merged = torch.full((images,), math.inf, device=device)  # untrained images count as the hardest
        self.latest = torch.full_like(self._merged, -1.0)

    def listen(self, model: Any) -> None:
        """Record the losses of a model's training steps. Raise UsageError if the model has no loss hooks."""
        if not hasattr(model, "loss_hooks"):
            raise UsageError("data.skip_easy needs the loss of each image: train an ImageClassifier, or set it to 0")
        # A resumed fit with other images than at its setup listens again.
        model.loss_hooks[:] = [hook for hook in model.loss_hooks if not isinstance(hook, LastLosses)] + [self]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `__call__` writes to."""
        return (self.latest,)

    def __call__(self, losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Record the losses (B,) of a training batch, and return them: a loss hook of the model."""
        if batch.loss_weight:
            self.latest[batch.indices] = losses.detach().float()
        return losses

    def merge(self) -> None:
        """Merge the losses of all devices. Collective: every rank must call this."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.latest, torch.distributed.ReduceOp.MAX)
        self._merged = torch.where(self.latest >= 0, self.latest, self._merged)
        self.latest.fill_(-1.0)  # in place, because captured steps write to this tensor

    def gather(self) -> Tensor:
        """Return the loss of every image, float32 (N,), on the CPU. Collective: every rank must call this."""
        self.merge()
        return self._merged.cpu()

    def restore(self, losses: Tensor) -> None:
        """Restore losses returned by `gather` before a resume."""
        if losses.shape == self._merged.shape:
            self._merged.copy_(losses)


@dataclass(eq=False)
class HardRoundsLoader(TrainLoader):
    """Training batches of one rank. Late in the training, they are rounds through the hardest images.

    Each round is augmented like a separate epoch.

    Args:
        losses: the last loss of each image, recorded by the training steps.
        skip_easy: share of the images that a round skips.
        skip_from: the epoch, and the batch in it, of the first round.
    """

    _: KW_ONLY
    losses: LastLosses
    skip_easy: float
    skip_from: tuple[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hard = torch.empty(0, dtype=torch.int64)  # rows of the current round

    def round_state(self) -> dict[str, Tensor]:
        """Return the losses and the rows of the current round. Collective: every rank must call this."""
        return {"losses": self.losses.gather(), "hard": self._hard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the saved position, in the saved round."""
        super().load_state_dict(state)
        losses, hard = state.get("losses"), state.get("hard")
        if not isinstance(losses, Tensor) or not isinstance(hard, Tensor):
            return
        if losses.is_floating_point() and hard.dtype == torch.int64:
            self.losses.restore(losses)
            self._hard = hard[torch.isin(hard, self.indices)]

    def __iter__(self) -> Iterator[Batch]:
        self.losses.merge()  # before images move to other devices
        yield from super().__iter__()

    def next_pass(self) -> Pass:
        """Return the pass over all images before the first round, then the current round."""
        begin = self._full_batches(self.epoch)
        if self.position < begin:
            return super().next_pass()._replace(end=begin)
        length = max(1, round((1 - self.skip_easy) * len(self.indices) / self.batch_size))  # batches
        size = min(length * self.batch_size, len(self.indices))
        number, batches_done = divmod(self.position - begin, length)
        rounds_per_epoch = -(-len(self) // length)
        epoch, batch = self.skip_from
        # Round numbers continue the epoch numbers, so that alternating flips alternate.
        draw_epoch = epoch + (batch > 0) + (self.epoch - epoch) * rounds_per_epoch + number
        if batches_done == 0 or len(self._hard) != size:  # a new round, or a checkpoint with other images
            rows = shuffled(self.indices, self.seed, draw_epoch)  # random order of equal losses
            losses = self.losses.gather()[rows]
            self._hard = rows[losses.argsort(descending=True, stable=True)[:size]]
        first = begin + number * length
        return Pass(
            first, min(first + length, len(self)), self.epoch_rows(draw_epoch, self._hard), self.maker(draw_epoch)
        )

    def _full_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch before the first round."""
        first_epoch, first_batch = self.skip_from
        if epoch < first_epoch:
            return len(self)
        return first_batch if epoch == first_epoch else 0
