"""Train on smaller images first.

Small images cost less, and early epochs learn nearly as much from them (Howard, fast.ai's DAWNBench entry, 2018;
Touvron et al., Fixing the train-test resolution discrepancy, 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from cifar_lit.base.errors import UsageError

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.training.classifier import ImageClassifier


def check_resolutions(resolutions: Mapping[int, float], height: int) -> None:
    """Raise UsageError if a schedule of sizes is invalid for images of this height."""
    for side in resolutions:
        if not 0 < side <= height:
            raise UsageError(f"resolutions has a side of {side} pixels: use 1 … {height} for these images")
    total = sum(resolutions.values())
    if total > 1 + 1e-9:
        raise UsageError(f"the shares in resolutions.sides add up to {total:g}: use at most 1")


@final
class Resolutions(Callback):
    """Train on smaller images first; the remaining epochs, at least the last one, and all evaluation are at full size.

    Args:
        sides: share of the epochs by side in pixels, in the order of training, such as {24: 0.4, 28: 0.3}.
    """

    def __init__(self, sides: dict[int, float]) -> None:
        self._sides = sides

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Set the size of the training images; raise UsageError for sizes that do not fit the images."""
        if stage != "fit":
            return
        data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
        check_resolutions(self._sides, data.input_shape[1])
        data.side = partial(self.side, epochs=data.epochs)
        pl_module.needs_length = "resolutions"

    def side(self, epoch: int, epochs: int | None) -> int | None:
        """Return the height in pixels of the images of an epoch, None for full size. epochs: number of all epochs."""
        if epochs is None or epoch == epochs - 1:
            return None
        end = 0.0
        for side, share in self._sides.items():
            end += share
            if epoch < round(end * epochs):  # whole epochs
                return side
        return None
