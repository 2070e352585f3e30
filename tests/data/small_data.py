"""Drawn images in batches of 16, and what stands in for a Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cifar_lit.data.datamodule import ImageData


def shapes_data(**settings: Any) -> ImageData:
    """50 images of 12 pixels to train on, 10 to validate on and 12 to test on."""
    return ImageData("shapes", **{"count": 60, "image_size": 12, "val_size": 10, "batch_size": 16, **settings})


def trainer_at(
    epoch: int,
    epochs: int | None,
    training: bool = True,
    global_rank: int = 0,
    max_steps: int = -1,
    accumulate: int = 1,
    world_size: int = 2,
) -> Any:
    """A Trainer of so many devices that is in an epoch."""
    device = SimpleNamespace(root_device=torch.device("cpu"))
    rank = {
        "global_rank": global_rank,
        "world_size": world_size,
        "strategy": device,
        "overfit_batches": 0.0,
        "lightning_module": None,
    }
    length = {"max_epochs": epochs, "max_steps": max_steps}
    length |= {"accumulate_grad_batches": accumulate, "limit_train_batches": 1.0}
    return SimpleNamespace(current_epoch=epoch, training=training, **length, **rank)
