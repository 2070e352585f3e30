"""Collect the predictions of an evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class PredictionCollector(Metric):
    """Predictions of every image in one pass over a set, in the order of the set.

    Updates do not synchronise the device. All processes exchange their logits at the end.
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
        """Add logits (B, classes), labels, int64 (B,), -1 for padding, and rows of the set, int64 (B,)."""
        self.indices.append(indices)
        self.labels.append(labels)
        self.logits.append(logits.detach().float())  # some backends cannot send bfloat16

    def compute(self) -> dict[str, Tensor]:
        """Return `indices` and `labels`, int64 (N,), `probabilities` (N, classes), and `novelty` (N,), the energy.

        All are on the CPU. Images of all devices are sorted by index. Floats are float64, in which different logits
        have different probabilities.
        """
        indices, labels, logits = (dim_zero_cat(state).cpu() for state in (self.indices, self.labels, self.logits))
        rows = indices.argsort()
        rows = rows[labels[rows] >= 0]  # not in `update`, where it would synchronise the device
        logits = logits[rows].double()
        values = {"probabilities": logits.softmax(1), "novelty": -logits.logsumexp(1)}
        return {"indices": indices[rows], "labels": labels[rows], **values}

    def predictions(self) -> dict[str, Tensor]:
        """Return the result of `compute`, with at least one dimension: torchmetrics squeezes single rows."""
        return {name: torch.atleast_1d(values) for name, values in self.compute().items()}
