"""Where the images are kept, and how many batches the Trainer is handed at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar

from cifar_lit.data.imageset import ImageSet
from cifar_lit.errors import UsageError, nearest

PLACEMENTS = ("auto", "device", "host")
LARGEST_SHARE = 0.5  # of free memory that images may take by themselves; net, activations and others need the rest
# Images a chunk holds. On a CPU some tens of milliseconds of work, so that Ctrl-C and the bar stay quick; elsewhere
# enough that the Trainer is asked a few times a second.
CPU_CHUNK, DEVICE_CHUNK = 512, 16_384


def check_placement(placement: str) -> None:
    """Raises UsageError for what is no placement."""
    if placement not in PLACEMENTS:
        raise UsageError(
            f"data.placement must be one of {', '.join(PLACEMENTS)}, not {placement!r}.{nearest(placement, PLACEMENTS)}"
        )


def choose_placement(placement: str, size: int, free: int | None) -> str:
    """`device` or `host` for images of `size` bytes where `free` bytes are free (None if nobody knows: they are few)."""
    if placement != "auto":
        return placement
    return "device" if free is None or size <= LARGEST_SHARE * free else "host"


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, None where the system does not tell."""
    if device.type == "cpu":
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable()
        except (ValueError, OSError, AttributeError):
            return None
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return int(ask(device)[0]) if ask else None


def _reclaimable() -> int:
    """Bytes of the file cache, which the system gives back when asked for memory."""
    try:
        with Path("/proc/meminfo").open() as file:
            for line in file:
                if line.startswith("Cached:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def on_device(images: ImageSet, device: torch.device) -> ImageSet:
    """The set with its images and labels in the memory of `device`."""
    if images.images.device == device:
        return images
    return ImageSet(images.images.to(device), images.labels.to(device), images.classes)


def chunk_size(trainer: pl.Trainer | None, batch_size: int, device: torch.device) -> int:
    """How many batches a call of `training_step` gets when the user has not said.

    One where a setting or a callback of the Trainer counts calls, so that it counts batches, as it says.
    """
    if trainer is None or _counts_batches(trainer):
        return 1
    images = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    return max(1, images // batch_size)


def _counts_batches(trainer: Any) -> bool:
    limits = (trainer.limit_train_batches, trainer.val_check_interval)
    if any(limit not in (None, 1.0) or type(limit) is int for limit in limits):
        return True
    return bool(trainer.max_steps > 0 or trainer.fast_dev_run or trainer.overfit_batches or any(map(_counts, trainer.callbacks)))


def _counts(callback: Callback) -> bool:
    """Whether a callback does something at each batch, of which it would miss some."""
    if getattr(callback, "takes_chunks", False) or isinstance(callback, ProgressBar):
        return False
    if isinstance(callback, ModelCheckpoint):
        return bool(callback._every_n_train_steps)
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step", "on_after_backward")
    # of the object, as LambdaCallback's hooks are not its class's
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook) for hook in hooks)
