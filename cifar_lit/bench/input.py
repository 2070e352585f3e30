"""`cifar-lit bench input`: our batches against torchvision transforms in a DataLoader."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.transforms import v2

from cifar_lit.bench.plain import ArrayImages, batches_on_device
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.bench.training import add_data_arguments, read_clock
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_devices, detect_machine

WHAT = (
    "Training images a second, cropped (4 pixels of reflect padding), flipped, normalised and on the device that the Trainer "
    "chooses: ours, against torchvision's transforms on PIL images in a DataLoader with 0 and with 2 workers, and against its v2 "
    "transforms on tensors. All take turns in one process; each turn's first batch is off the clock, as is the workers' start."
)
PADDING = 4
OURS = "ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_data_arguments(parser, dataset="shapes")
    parser.add_argument("--batch-size", type=int, default=500, help="images a batch")
    parser.add_argument("--batches", type=int, default=20, help="batches of each in a round, that are counted")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, after one to warm up")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 2 or settings.batches < 1:
        raise UsageError("a measurement takes at least --rounds 2 of --batches 1")
    size = settings.batch_size
    own = {"batch_size": size, "val_size": 0, "crop": PADDING, "flip": "random", "count": settings.count}
    data = ImageData(settings.dataset, root=settings.root, **own)
    if len(data.train_images) < (settings.batches + 1) * size:
        raise UsageError(f"{len(data.train_images):,} images are less than a round: lower --batches or --batch-size")
    accelerator, devices = choose_devices(detect_machine(), settings.accelerator, 1)
    device = pl.Trainer(accelerator=accelerator, devices=devices, logger=False, enable_checkpointing=False).strategy.root_device
    turns = sides(data, settings.batches, device)
    speeds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(settings.rounds + 1):
        for name, start in turns.items():
            stream = start()
            next(stream)
            started = read_clock(device)
            images = sum(len(labels) for _, labels in islice(stream, settings.batches))
            speeds[name].append(images / (read_clock(device) - started))
    rows: list[Row] = [(name, spread(values[1:]), "images/s") for name, values in speeds.items()]  # the first warms up
    for name, values in speeds.items():
        if name != OURS:
            ratio = spread(ours / value for ours, value in zip(speeds[OURS][1:], values[1:], strict=True))  # of the same round
            rows.append((f"ours / {name}", ratio, "×"))
    publish(
        "input",
        vars(settings),
        f"{settings.dataset} {'×'.join(map(str, data.input_shape))} · batch {size} · on {device.type}",
        rows,
        f"of {settings.rounds} rounds of {settings.batches} batches each, in turn",
        device=device.type,
    )


def sides(data: ImageData, batches: int, device: torch.device) -> dict[str, Callable[[], Iterator[tuple[Tensor, Tensor]]]]:
    """What is compared, by name: each starts a turn, an iterator over images and labels on the device.

    A turn of the DataLoaders ends by itself after one batch more than `batches`; ours goes on where it was.
    """
    crop: dict[str, Any] = {"size": data.input_shape[1:], "padding": PADDING, "padding_mode": "reflect"}
    moves = [transforms.RandomCrop(**crop), transforms.RandomHorizontalFlip()]
    pil = [Image.fromarray, *moves, transforms.ToTensor(), transforms.Normalize(*data.statistics)]
    moves = [v2.RandomCrop(**crop), v2.RandomHorizontalFlip()]
    tensors = [v2.ToImage(), *moves, v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor(), v2.Normalize(*data.statistics)]

    def loading(transforms: Sequence[Callable[[Any], Any]], workers: int) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
        images = ArrayImages(data.train_images, transforms)
        loader = DataLoader(
            images,
            batch_size=data.batch_size,
            sampler=RandomSampler(images, num_samples=(batches + 1) * data.batch_size),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type != "cpu",
        )
        return lambda: ((pixels.to(device, non_blocking=True), labels.to(device)) for pixels, labels in loader)

    ours = ((batch.images, batch.labels) for epoch in batches_on_device(data, device) for batch in epoch)
    return {
        OURS: lambda: ours,
        "PIL, DataLoader, 2 workers": loading(pil, 2),
        "PIL, DataLoader, no worker": loading(pil, 0),
        "v2 on tensors, DataLoader, 2 workers": loading(tensors, 2),
    }
