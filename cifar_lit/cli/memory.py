"""Refuse a training that certainly does not fit into memory, before its images are loaded.

The bound counts weights, gradients, and the tensors that a step saves for the backward pass. The peak of a step is a
third higher or more, by an amount that depends on the net: so a training that passes may still run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cifar_lit.data.image_size import parse_image_size
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import UsageError
from cifar_lit.hardware import Machine, count_devices, free_memory
from cifar_lit.models.registry import build_net
from cifar_lit.plugins import is_import_path

COUNTS = {"cifar10": 50_000, "cifar100": 50_000, "fashion_mnist": 60_000}
MAX_RATIO = 4000  # bytes that a net is expected to save at most for each byte of an image
PEAK = 2.0  # times the saved bytes: a high estimate of the peak


def check_memory(settings: Any, machine: Machine, shape: Sequence[int] = (), images: int = 0) -> None:
    """Raise UsageError if a training step cannot fit into the free memory.

    Args:
        settings: the parsed settings.
        machine: this machine.
        shape: channels, height and width of an image; () before the images are loaded.
        images: number of training images.
    """
    data, model, trainer = settings.data, settings.model, settings.trainer
    fixed = SOURCES[data.dataset].fixed if data.dataset in SOURCES else {}
    if (bool(fixed) or data.dataset == "shapes") == bool(shape):
        return  # unknown before the images are loaded, or checked then
    if not shape:
        count = COUNTS.get(data.dataset, data.count)
        held_out = data.val_size if data.val_size >= 1 else data.val_size * count
        images = int((count - held_out) * data.train_share * (0.5 if data.folds else 0.95))  # at least
        size = parse_image_size(fixed.get("image_size", data.image_size) or 32)
        shape = (fixed.get("channels", data.channels) or 3, *size)
    kind = machine.kind(trainer.accelerator)
    # A compiled net saves fewer tensors, and so does a pretrained net with frozen layers.
    saves_less = (kind == "gpu" and model.compile) or model.weights or sum((data.resolutions or {}).values()) >= 1
    if saves_less or is_import_path(model.net) or kind not in ("cpu", "gpu"):
        return
    # Processes on one CPU share its memory. Each GPU has its own.
    processes = count_devices(machine, trainer.accelerator, trainer.devices)
    nets, parts = (processes, 1) if kind == "cpu" else (1, processes)
    free = free_memory(torch.device("cpu")) if kind == "cpu" else max(size for _, size in machine.gpus)
    batch = min(data.batch_size, images) / (parts * trainer.num_nodes)
    if free is None or 4 * math.prod(shape) * batch * MAX_RATIO < free:  # saves the time of a measurement
        return
    built = {"channels": shape[0], "image_size": tuple(shape[1:]), "num_classes": 10, "width": model.width}
    try:
        with torch.random.fork_rng(devices=[]):
            net = build_net(model.net, **built, options=model.net_options)
            two, four = (saved_bytes(net, shape, number) for number in (2, 4))
    except Exception:  # reported when the net of the training is built
        return
    scale = 1.0 if trainer.precision in ("32-true", "64-true") else 0.5
    image = scale * (four - two) / 2
    weights = scale * 2 * nets * sum(weight.nbytes for weight in net.parameters())
    if (need := weights + batch * image) > free:
        fitting = int((free - weights) / (PEAK * image))
        remedy = (
            f"use --batch-size {2 ** int(math.log2(fitting)) * parts}" if fitting >= 1 else "choose a smaller --net"
        )
        text = f"a step of {data.batch_size:,} images needs at least {need / 1e9:.1f} GB of {kind.upper()} memory"
        raise UsageError(f"{text}, and {free / 1e9:.1f} GB are free: {remedy}")


def saved_bytes(net: nn.Module, shape: Sequence[int], size: int) -> int:
    """Return the bytes that autograd saves for the backward pass of `size` images, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in net.parameters()}
    saved: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(net(torch.zeros(size, *shape)), torch.zeros(size, dtype=torch.int64))
    return sum(storage.nbytes() for storage in saved.values())
