"""Late in the training, skip the images with the lowest loss.

An epoch keeps its number of batches, but consists of several rounds through the hard images. Each round selects them
again, by the last training loss of every image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import Batch
from cifar_lit.data.loaders import Pass, TrainLoader, shuffled

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier


class LastLosses:
    """The last training loss of each image, equal on all devices after `gather`, and the images with the largest ones.

    Attributes:
        latest: float32 (N,) on the device of the net: losses since the last `merge`, -1 for other images.
        hard: rows of the current round, int64.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self._merged = torch.full((images,), math.inf, device=device)  # untrained images count as the hardest
        self.latest = torch.full_like(self._merged, -1.0)
        self.hard = torch.empty(0, dtype=torch.int64)

    def record(self, losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Record the losses (B,) of a training batch, and return them."""
        if batch.loss_weight:
            self.latest[batch.indices] = losses.detach().float()
        return losses

    def merge(self) -> None:
        """Merge the losses of all devices. Collective: every rank must call this."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.latest, torch.distributed.ReduceOp.MAX)
        self._merged = torch.where(self.latest >= 0, self.latest, self._merged)
        self.latest.fill_(-1.0)

    def gather(self) -> Tensor:
        """Return the loss of every image, float32 (N,), on the CPU. Collective: every rank must call this."""
        self.merge()
        return self._merged.cpu()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the losses and the rows of the current round. Collective: every rank must call this."""
        return {"losses": self.gather(), "hard": self.hard}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the losses and the current round of a resumed fit, which leaves out images that were added."""
        self._merged = state["losses"].to(self._merged.device)
        self.latest = torch.full_like(self._merged, -1.0)
        self.hard = state["hard"]


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
        draw_epoch = self._draw_epoch(number, rounds_per_epoch=math.ceil(len(self) / length))
        if batches_done == 0 or len(self.losses.hard) != size:  # a new round, or a checkpoint with other images
            rows = shuffled(self.indices, self.seed, draw_epoch)  # random order of equal losses
            losses = self.losses.gather()[rows]
            self.losses.hard = rows[losses.argsort(descending=True, stable=True)[:size]]
        first = begin + number * length
        rows, end = self.epoch_rows(draw_epoch, self.losses.hard), min(first + length, len(self))
        return Pass(first, end, rows, self.maker(draw_epoch))

    def _draw_epoch(self, number: int, rounds_per_epoch: int) -> int:
        """Return the epoch whose draws a round uses. The numbers continue, so that alternating flips alternate."""
        first_epoch, first_batch = self.skip_from
        first_draw = first_epoch
        if first_batch > 0:  # the batches of that epoch before the first round have drawn with its number
            first_draw += 1
        return first_draw + (self.epoch - first_epoch) * rounds_per_epoch + number

    def _full_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch before the first round."""
        first_epoch, first_batch = self.skip_from
        if epoch < first_epoch:
            return len(self)
        return first_batch if epoch == first_epoch else 0


@final
class SkipEasy(Callback):
    """Skip easy images late in the training: those whose latest loss is lowest. This improves short trainings.

    Args:
        share: share of the training images to skip, above 0 and below 1. The others are shown more often.
        start: share of the steps after which easy images are skipped.
    """

    def __init__(self, share: float = 0.5, start: float = 0.6) -> None:
        if not 0 < share < 1:
            raise UsageError(f"skip_easy.share is a share of the images, above 0 and below 1, not {share:g}")
        self._share, self._start = share, start
        self._losses = LastLosses(0, torch.device("cpu"))

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Set the training loader; raise UsageError without a length, or if another feature sets it."""
        if stage != "fit":
            return
        data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
        length = data.fit_length
        if length.total is None:
            raise UsageError("skip_easy needs the length of the training: set --epochs or --trainer.max_steps")
        skip_from = divmod(round(self._start * length.total), length.epoch)
        pl_module.needs_length = "skip_easy"
        self._losses = LastLosses(len(data.train_images), trainer.strategy.root_device)
        pl_module.loss.changes.insert(0, self._losses.record)  # before changes of the losses
        data.make_train_loader = partial(
            HardRoundsLoader, losses=self._losses, skip_easy=self._share, skip_from=skip_from
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the losses and the rows of the current round. Collective: every rank must call this."""
        return self._losses.state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Restore the losses and the current round of a resumed fit."""
        self._losses.load_state_dict(state_dict)
