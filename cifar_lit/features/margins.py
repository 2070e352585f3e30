"""Mean logit margin of each training image over the training, to find wrong labels.

The margin of an image is the logit of its label minus the largest other logit. Its mean over the training is the area
under the margin (AUM; G. Pleiss et al., Identifying Mislabeled Data using the Area Under the Margin Ranking, NeurIPS
2020). It is low for wrong labels, even if the net memorises them at the end.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cifar_lit.base.errors import UsageError
from cifar_lit.base.files import write_array

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.data.image_set import Batch
    from cifar_lit.training.classifier import ImageClassifier

# A margin is rounded to this unit. Sums of integers do not depend on the order of steps and devices.
UNIT = 2.0**-20


@final
class Margins(Callback):
    """Sum the margins of the training steps, and write `margins.npy` to the run folder when the fit ends.

    The file has a float32 for each row of the datamodule's `train_images`: the mean margin, NaN for images that were
    not trained on.

    Attributes:
        sums: int64 (2, N) on the device of the net: sum of the margins in units, and number of steps, of each image.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(2, 0, dtype=torch.int64)
        self._is_first = True

    def setup(self, trainer: pl.Trainer, pl_module: ImageClassifier, stage: str) -> None:
        """Start without margins; raise UsageError if images are mixed."""
        if stage != "fit":
            return
        data: ImageData = trainer.datamodule  # type: ignore[attr-defined]
        if data.augment.mixes:
            raise UsageError("margins needs one label per image: remove mixup and cutmix, or use --margins false")
        self._is_first = trainer.is_global_zero
        self.sums = torch.zeros(2, len(data.train_images), dtype=torch.int64, device=trainer.strategy.root_device)
        pl_module.loss.changes.append(self.add)

    def add(self, losses: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Add the margins of a training batch with logits (B, classes); return its losses (B,)."""
        if batch.loss_weight:
            logits, labels = logits.detach().float(), batch.labels[:, None]
            others = logits.scatter(1, labels, -math.inf).amax(1)
            units = ((logits.gather(1, labels)[:, 0] - others) / UNIT).round().long()
            self.sums.index_add_(1, batch.indices, torch.stack((units, torch.ones_like(units))))
        return losses

    def gather(self) -> Tensor:
        """Return `sums` over all devices, on the CPU. Collective: every rank must call this."""
        sums = self.sums.clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        return sums.cpu()

    def state_dict(self) -> dict[str, object]:
        """Return the sums of all devices. Collective: every rank must call this."""
        return {"sums": self.gather()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Restore the sums on the first device."""
        if self._is_first:
            self.sums.copy_(state_dict["sums"])

    def on_fit_end(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Write the mean margins to the folder that contains the folder of the checkpoints.

        A fit that resumes after its last step has no `on_train_end`.
        """
        total, steps = self.gather().double()
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if trainer.is_global_zero and folder and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_array(Path(folder).parent / "margins.npy", (total * UNIT / steps).float().numpy())
