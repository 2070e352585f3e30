"""`data.skip_easy`: late in a training, leave out the images of least loss.

An epoch then has as many batches as before, but consists of several rounds through the hard images. Each round
chooses them anew, by the losses of all images when they were last trained on.
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
    if not 0 <= skip_easy < 1 or not 0 <= skip_from <= 1:
        share = "data.skip_easy is a share of the images, from 0 to below 1"
        raise UsageError(f"{share}, and data.skip_from one of the steps")
    if skip_easy and (sampling != "none" or not shuffle):
        fault = "data.skip_easy chooses images and their order"
        raise UsageError(f"{fault}: leave data.sampling none and data.shuffle true")


def first_hard_batch(skip_from: float, length: FitLength) -> tuple[int, int]:
    """Return the epoch, and the batch in it, from which easy images are left out: after a share of all batches."""
    if length.total is None:
        raise UsageError("data.skip_from must know the training's end: set --epochs or --trainer.max_steps")
    return divmod(round(skip_from * length.total), length.epoch)


class LastLosses:
    """The loss of each training image when it was last trained on, equal on all devices after `gather`.

    Attributes:
        latest: float32 (N,), on the device of the net. Losses written by this device since the last `merge`, else -1.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self._merged = torch.full((images,), math.inf, device=device)  # images never trained on count as the hardest
        self.latest = torch.full_like(self._merged, -1.0)

    def listen(self, model: Any) -> None:
        """Record the losses of a model's training steps. Raise UsageError if the model has no loss hooks."""
        if not hasattr(model, "loss_hooks"):
            raise UsageError("data.skip_easy needs the loss of each image: train an ImageClassifier, or set it to 0")
        model.loss_hooks.append(self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `__call__` writes to."""
        return (self.latest,)

    def __call__(self, losses: Tensor, batch: Batch) -> Tensor:
        """Record the losses (B,) of a training batch, and return them: a loss hook of the model."""
        if batch.loss_weight:
            self.latest[batch.indices] = losses.detach().float()
        return losses

    def merge(self) -> None:
        """Share the losses written by each device with all. Collective: every rank must call this."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.latest, torch.distributed.ReduceOp.MAX)
        self._merged = torch.where(self.latest >= 0, self.latest, self._merged)
        self.latest.fill_(-1.0)  # in place: captured steps write to this tensor

    def gather(self) -> Tensor:
        """Return the loss of every image, float32 (N,), on the CPU. Collective: every rank must call this."""
        self.merge()
        return self._merged.cpu()

    def restore(self, losses: Tensor) -> None:
        """Restore the losses that `gather` returned in an earlier part of the training."""
        if losses.shape == self._merged.shape:
            self._merged.copy_(losses)


@dataclass(eq=False)
class HardRoundsLoader(TrainLoader):
    """Training batches of one device, from some batch on in rounds through the hardest images.

    Each round is augmented as an epoch of its own.

    Args:
        losses: where the training steps record the loss of each image.
        skip_easy: share of the images that a round leaves out.
        skip_from: the epoch, and the batch in it, with which the rounds begin.
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
        self.losses.merge()  # now: in this epoch the devices get other images than in the one before
        yield from super().__iter__()

    def next_pass(self) -> Pass:
        """Return the pass over all images until the rounds begin, then the current round."""
        begin = self._full_batches(self.epoch)
        if self.position < begin:
            return super().next_pass()._replace(end=begin)
        length = max(1, round((1 - self.skip_easy) * len(self.indices) / self.batch_size))  # batches
        size = min(length * self.batch_size, len(self.indices))
        number, batches_done = divmod(self.position - begin, length)
        rounds_per_epoch = -(-len(self) // length)
        epoch, batch = self.skip_from
        # Rounds are numbered on from the epochs, so that alternating flips alternate.
        draw_epoch = epoch + (batch > 0) + (self.epoch - epoch) * rounds_per_epoch + number
        is_other_size = len(self._hard) != size  # a checkpoint of other images
        if batches_done == 0 or is_other_size:
            rows = shuffled(self.indices, self.seed, draw_epoch)  # decides between images of equal losses
            losses = self.losses.gather()[rows]
            self._hard = rows[losses.argsort(descending=True, stable=True)[:size]]
        first = begin + number * length
        return Pass(first, min(first + length, len(self)), *self.epoch_plan(draw_epoch, self._hard))

    def plan_next_epoch(self) -> None:
        """Plan the next epoch ahead if it begins with all images. Hard ones are not known yet."""
        if self._full_batches(self.epoch + 1):
            super().plan_next_epoch()

    def _full_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch before the rounds begin."""
        first_epoch, first_batch = self.skip_from
        if epoch < first_epoch:
            return len(self)
        return first_batch if epoch == first_epoch else 0
