"""Generated images in batches of 16, and a fake Trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from grouped import grouped

from cifar_lit.data.datamodule import ImageData


def shapes_data(**settings: Any) -> ImageData:
    """Return 50 training images of 12 pixels, 10 validation and 12 test images."""
    defaults = {"count": 60, "image_size": 12, "val_size": 10, "batch_size": 16}
    return ImageData("shapes", **grouped({**defaults, **settings}))


def trainer_at(epoch: int, epochs: int | None, training: bool = True, **settings: Any) -> Any:
    """Return a fake Trainer for rank 0 of two devices, in the given epoch."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    rank = {"global_rank": 0, "world_size": 2, "strategy": strategy, "lightning_module": None}
    length = {"max_epochs": epochs, "max_steps": -1, "accumulate_grad_batches": 1}
    limits = {"limit_train_batches": 1.0, "overfit_batches": 0.0}
    return SimpleNamespace(current_epoch=epoch, training=training, **{**rank, **length, **limits, **settings})
