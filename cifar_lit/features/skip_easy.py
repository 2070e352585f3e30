"""Late in the training, skip the images with the lowest loss.

An epoch keeps its number of batches, but consists of several rounds through the hard images. Each round selects them
again, by the last training loss of every image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.hooks import methods
from cifar_lit.data.batch import Batch
from cifar_lit.data.loaders import FitLength, Pass, TrainLoader, shuffled

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier


def first_hard_batch(start: float, length: FitLength) -> tuple[int, int]:
    """Return the epoch, and the batch in it, from which easy images are skipped."""
    if length.total is None:
        raise UsageError("skip_easy needs the length of the training: set --epochs or --trainer.max_steps")
    return divmod(round(start * length.total), length.epoch)


class LastLosses:
    """The last training loss of each image, equal on all devices after `gather`.

    Attributes:
        latest: float32 (N,) on the device of the net: losses since the last `merge`, -1 for other images.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self._merged = torch.full((images,), math.inf, device=device)  # untrained images count as the hardest
        self.latest = torch.full_like(self._merged, -1.0)

    def record(self, losses: Tensor, batch: Batch) -> None:
        """Record the losses (B,) of a training batch."""
        if batch.loss_weight:
            self.latest[batch.indices] = losses.detach().float()

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

    def restore(self, losses: Tensor) -> None:
        """Restore losses returned by `gather` before a resume."""
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
        self.hard = torch.empty(0, dtype=torch.int64)  # rows of the current round

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
        if batches_done == 0 or len(self.hard) != size:  # a new round, or a checkpoint with other images
            rows = shuffled(self.indices, self.seed, draw_epoch)  # random order of equal losses
            losses = self.losses.gather()[rows]
            self.hard = rows[losses.argsort(descending=True, stable=True)[:size]]
        first = begin + number * length
        rows, end = self.epoch_rows(draw_epoch, self.hard), min(first + length, len(self))
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

    depends_on_length = True

    def __init__(self, share: float = 0.5, start: float = 0.6) -> None:
        if not 0 < share < 1:
            raise UsageError(f"skip_easy.share is a share of the images, above 0 and below 1, not {share:g}")
        self._share, self._start = share, start
        self._losses: LastLosses | None = None  # None before the current fit has begun
        self._loader: HardRoundsLoader | None = None
        self._restored: dict[str, Tensor] = {}

    def check(self, model: ImageClassifier, data: ImageData) -> None:
        """Raise UsageError if the order of the images is set elsewhere."""
        if methods(data.trainer, "order"):
            raise UsageError("skip_easy sets the order of images: leave balanced out")

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Forget the state of an earlier fit, and see the losses of each step."""
        if stage != "fit":
            return
        pl_module.loss.changes.append(self.record)
        self._losses = self._loader = None
        self._restored = {}

    def record(self, losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Record the losses (B,) of a training batch, and return them."""
        if self._losses is not None:
            self._losses.record(losses, batch)
        return losses

    def train_loader(self, settings: dict[str, Any], length: FitLength, device: torch.device) -> TrainLoader:
        """Return the training loader. settings: arguments of `TrainLoader`. device: that of the net."""
        if self._losses is None:
            self._losses = LastLosses(len(settings["source"]), device)
        skip_from = first_hard_batch(self._start, length)
        self._loader = HardRoundsLoader(**settings, losses=self._losses, skip_easy=self._share, skip_from=skip_from)
        if self._restored:
            self._losses.restore(self._restored["losses"])
            self._loader.hard = self._restored["hard"]
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the losses and the rows of the current round. Collective: every rank must call this."""
        if self._loader is None:
            return {}
        return {"losses": self._loader.losses.gather(), "hard": self._loader.hard}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Keep the state for the loader, which is created later."""
        self._restored = state_dict

    def card(self) -> dict[str, str]:
        """Return the line of the start card."""
        return {"skips": f"the easiest {self._share:.0%} of the images after {self._start:.0%} of the steps"}
