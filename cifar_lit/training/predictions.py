"""The prediction of every image of an evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class PredictionCollector(Metric):
    """The logits of every image of one pass over a set, in the order of the set.

    Batches are kept without synchronising the device, and gathered from all processes at the end.
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
        """Keep logits (B, classes) of images with int64 labels (B,), -1 for padding, and int64 rows (B,) of their set."""
        self.indices.append(indices)
        self.labels.append(labels)
        self.logits.append(logits.detach().float())  # not every backend can send bfloat16

    def compute(self) -> dict[str, Tensor]:
        """Return `indices` and `labels` int64 (N,), `probabilities` float64 (N, classes) of all devices, on the CPU, by index.

        In float64, different logits stay different, so that the likeliest class is the one that was counted.
        """
        indices, labels, logits = (dim_zero_cat(state).cpu() for state in (self.indices, self.labels, self.logits))
        rows = indices.argsort()
        rows = rows[labels[rows] >= 0]  # selecting by value per batch would synchronise the device
        return {"indices": indices[rows], "labels": labels[rows], "probabilities": logits[rows].double().softmax(1)}

    def predictions(self) -> dict[str, Tensor]:
        """Return what `compute` returns, with a row also for a single image, which torchmetrics squeezes to scalars."""
        return {name: torch.atleast_1d(values) for name, values in self.compute().items()}
