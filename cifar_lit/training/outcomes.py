"""What a net made of each image, gathered on its device while it is scored."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Outcomes(Metric):
    """The logits of every image that a pass over a set looked at, once each and in the order of the set.

    A batch is only noted, without waiting for the device; several processes put theirs together at the end. Until then an
    image takes four bytes a class there.
    """

    full_state_update = False

    indices: list[Tensor]
    labels: list[Tensor]
    logits: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("indices", "labels", "logits"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Notes logits (B, classes) of images with int64 labels (B,), -1 for padding, and int64 rows (B,) of their set."""
        self.indices.append(indices)
        self.labels.append(labels)
        self.logits.append(logits.detach().float())  # not every way between processes knows bfloat16

    def compute(self) -> dict[str, Tensor]:
        """`indices` and `labels` int64 (N,), `probabilities` float64 (N, classes) over all devices, on the CPU, by index.

        In float64, logits that differ stay different, so that the likeliest class is the one that was counted. Of a single
        image torchmetrics hands the first two out as scalars: see `rows`.
        """
        indices, labels, logits = (dim_zero_cat(state).cpu() for state in (self.indices, self.labels, self.logits))
        counted = labels >= 0  # chosen here, as choosing by value would have made each batch wait
        order = indices[counted].argsort()
        rows = torch.arange(len(labels))[counted][order]
        return {"indices": indices[rows], "labels": labels[rows], "probabilities": logits[rows].double().softmax(1)}

    def rows(self) -> dict[str, Tensor]:
        """What `compute` finds, with a row an image also where there is only one."""
        found: dict[str, Tensor] = self.compute()
        return {**found, "indices": found["indices"].reshape(-1), "labels": found["labels"].reshape(-1)}
