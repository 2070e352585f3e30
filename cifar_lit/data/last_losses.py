"""The loss that each training image had when it was last trained on, by which those that are learnt are left out."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LastLosses:
    """One loss a training image, the same on all devices once it is gathered.

    Attributes:
        latest: float32 (N,), beside the net: what this device's steps have written since the last gathering, -1 elsewhere.
    """

    def __init__(self, images: int, device: torch.device) -> None:
        self._known = torch.full(
            (images,), math.inf, device=device
        )  # of images that were not trained on yet: the first to be chosen
        self.latest = torch.full_like(self._known, -1.0)

    def merge(self) -> None:
        """Makes what each device has written known to all, which all have to come here for."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.latest, torch.distributed.ReduceOp.MAX)
        self._known = torch.where(self.latest >= 0, self.latest, self._known)
        self.latest.fill_(-1.0)  # in place, as captured steps write there

    def gather(self) -> Tensor:
        """Every image's loss, float32 (N,), on the CPU; all devices have to come here."""
        self.merge()
        return self._known.cpu()

    def restore(self, losses: Tensor) -> None:
        """Takes up what `gather` returned in an earlier part of the training."""
        if losses.shape == self._known.shape:
            self._known.copy_(losses)
