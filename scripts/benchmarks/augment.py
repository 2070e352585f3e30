"""Throughput of augmentation, ours and torchvision's: python scripts/benchmarks/augment.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from input import TensorImages, images_per_second
from loops import leave_signals
from script import run_script, set_threads
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision.transforms import v2

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.augment import Augment
from cifar_lit.data.batch import Batch
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_devices, detect_machine, keep_freed_memory
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Measure images/s from uint8 images in memory to augmented and normalised batches on the device. `data.augment` "
    "draws per image and computes on whole batches. It is compared with torchvision's v2 transforms of the same "
    "settings on tensors, image by image in a DataLoader with 2 workers. Both take turns in one process. The start of"
    " the workers and the first batches of each turn are not timed."
)
WORKERS = 2  # processes
READY = 4  # batches that the workers prefetch while the first is awaited; not timed either
BILINEAR = v2.InterpolationMode.BILINEAR
# Our settings, and a function from the side of the images to torchvision's transforms of the same meaning.
OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[int], list[Any]]]] = {
    "none": ({"brightness": 0.0}, lambda side: []),
    "crop": ({"scale": [0.35, 1]}, lambda side: [v2.RandomResizedCrop(side, (0.35, 1))]),
    "rotation": ({"rotation": 15}, lambda side: [v2.RandomRotation(15, BILINEAR)]),
    "perspective": ({"perspective": 0.5}, lambda side: [v2.RandomPerspective(0.5, p=1)]),
    "crop, rotation, perspective": (
        {"scale": [0.35, 1], "rotation": 15, "perspective": 0.2},
        lambda side: [
            *(v2.RandomResizedCrop(side, (0.35, 1)), v2.RandomRotation(15, BILINEAR), v2.RandomPerspective(0.2, p=1)),
        ],
    ),
    "brightness": ({"brightness": 0.4}, lambda side: [v2.ColorJitter(brightness=0.4)]),
    "contrast": ({"contrast": 0.4}, lambda side: [v2.ColorJitter(contrast=0.4)]),
    "saturation": ({"saturation": 0.4}, lambda side: [v2.ColorJitter(saturation=0.4)]),
    "hue": ({"hue": 0.1}, lambda side: [v2.ColorJitter(hue=0.1)]),
    "all four colours": (
        {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
        lambda side: [v2.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    ),
    "blur": ({"blur": 2}, lambda side: [v2.GaussianBlur(13, (0.1, 2))]),
    "erasing": ({"erasing": 0.5}, lambda side: [v2.RandomErasing(0.5)]),
    "trivial": ({"policy": "trivial"}, lambda side: [v2.TrivialAugmentWide(interpolation=BILINEAR)]),
    "randaugment": ({"policy": "randaugment"}, lambda side: [v2.RandAugment(interpolation=BILINEAR)]),
    "mixup": ({"mixup": 0.2}, lambda side: []),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--names", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="operations to measure"
    )
    parser.add_argument("--sides", nargs="+", type=int, default=[32, 224], help="sides of the images in pixels")
    parser.add_argument("--batch-size", type=int, default=128, help="images per batch")
    parser.add_argument("--batches", type=int, default=6, help="timed batches of each in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one that warms up")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, gpu or mps")
    parser.add_argument("--threads", type=set_threads, help="torch's threads")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.rounds < 2 or settings.batches < 1:
        raise UsageError("--rounds must be at least 2, and --batches at least 1")
    accelerator, devices = choose_devices(detect_machine(), settings.accelerator, 1)
    device = pl.Trainer(
        accelerator=accelerator, devices=devices, logger=False, enable_checkpointing=False
    ).strategy.root_device
    if device.type == "cpu":
        keep_freed_memory()  # same as in a fit
    progress = Progress(len(settings.sides) * len(settings.names), "operation")
    rows: list[Row] = []
    with suppress(Interrupted):
        for side in settings.sides:
            images = ImageData("shapes", image_size=side, count=4 * settings.batch_size, val_size=0)
            for name in settings.names:
                rows += measure(f"{name}, {side} px", images, *OPERATIONS[name], settings, device)
                progress.advance(len(rows) // 3)
    if rows:
        what = f"shapes of {' and '.join(map(str, settings.sides))} px · batch {settings.batch_size} · on {device.type}"
        publish(
            "augment", vars(settings), what, rows, f"of {settings.rounds} rounds of {settings.batches} batches, in turn"
        )


def measure(
    label: str,
    images: ImageData,
    ours: dict[str, Any],
    transforms: Callable[[int], list[Any]],
    settings: argparse.Namespace,
    device: torch.device,
) -> list[Row]:
    """Measure one operation; return the rows with the ratio of both speeds and with each speed."""
    side, size = images.input_shape[1], settings.batch_size
    data = ImageData("shapes", augment=Augment(**ours), val_size=0)
    data.parts = data.preprocessing.parts = images.parts
    as_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*data.statistics)]
    tensors = TensorImages(data.train_images, [*transforms(side), *as_floats])
    loader = DataLoader(
        tensors,
        batch_size=size,
        sampler=RandomSampler(tensors, replacement=True, num_samples=size * (settings.batches + 1 + READY)),
        num_workers=WORKERS,
        pin_memory=device.type != "cpu",
        worker_init_fn=leave_signals,
    )
    mixed = v2.MixUp(alpha=ours["mixup"], num_classes=data.class_count) if "mixup" in ours else lambda *batch: batch
    pixels, labels = (tensor.to(device) for tensor in (data.train_images.images, data.train_images.labels))

    def our_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(settings.batches + 1):
            rows = torch.randperm(len(labels), device=device)[:size]
            batch = Batch(pixels.index_select(0, rows), labels.index_select(0, rows), rows, epoch=number)
            prepared = data.preprocessing.train_batch(batch)
            yield prepared.images, prepared.labels

    def their_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in islice(loader, READY, None):
            yield mixed(*(tensor.to(device, non_blocking=True) for tensor in batch))

    speeds: list[tuple[float, float]] = []
    for number in range(settings.rounds + 1):
        our, their = (images_per_second(turn(), settings.batches, device) for turn in (our_batches, their_batches))
        speeds += [(our, their)] if number else []  # the first round warms up
    return [
        (f"{label}: ours / torchvision", spread(our / their for our, their in speeds), "×"),
        (f"{label}: ours", spread(our for our, _ in speeds), "images/s"),
        (f"{label}: torchvision, 2 workers", spread(their for _, their in speeds), "images/s"),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script())
