"""Number of batches of an epoch and of a fit."""

from __future__ import annotations

from typing import Any, NamedTuple


def count_batches(images: int, batch_size: int, parts: int = 1) -> int:
    """Return the number of training batches of an epoch.

    A last batch with fewer than 2 images per part is dropped, unless it is the only batch.

    Args:
        images: number of training images.
        batch_size: images per global batch.
        parts: number of devices that each need images of every batch.
    """
    full, remaining = divmod(images, batch_size)
    return full + (remaining >= 2 * parts or full == 0)


class FitLength(NamedTuple):
    """Number of batches of an epoch, at least 1, and of the whole fit, None if unlimited."""

    epoch: int
    total: int | None

    @property
    def epochs(self) -> int | None:
        """Number of epochs, the last one possibly incomplete; None if unlimited."""
        return None if self.total is None else -(-self.total // self.epoch)


def fit_length(trainer: Any, batches: int) -> FitLength:
    """Return the length of a fit from the Trainer's limits of batches, epochs and steps.

    Args:
        trainer: a Trainer, or None for no limits.
        batches: number of batches of the training loader.
    """
    if trainer is None:
        return FitLength(max(1, batches), None)
    limit = trainer.limit_train_batches
    epoch = max(1, min(batches, limit) if isinstance(limit, int) else int(limit * batches))
    limits = [epoch * trainer.max_epochs] if (trainer.max_epochs or -1) > 0 else []
    if trainer.max_steps > 0:
        accumulated = trainer.accumulate_grad_batches  # the last step of an epoch may have fewer
        epochs, steps = divmod(trainer.max_steps, -(-epoch // accumulated))
        limits.append(epochs * epoch + min(epoch, steps * accumulated))
    return FitLength(epoch, min(limits, default=None))
