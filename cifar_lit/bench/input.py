"""`cifar-lit bench input`: our batches against torchvision transforms in a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms
from torchvision.transforms import v2

from cifar_lit.bench.clock import read_clock
from cifar_lit.bench.plain import PilImages, ready_epochs
from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures
from cifar_lit.bench.training import add_data_arguments
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_devices, detect_machine

WHAT = (
    "Training batches a second, cropped (4 pixels of reflect padding), flipped, normalised and on the device that the Trainer "
    "chooses: ours, against torchvision's transforms on PIL images in a DataLoader with 0 and with 2 workers, and against its v2 "
    "transforms on tensors. All take turns in one process; each turn's first batch is off the clock, as is the workers' start."
)
PADDING = 4
OURS, WORKERS = "ours", "PIL, DataLoader, 2 workers"

Turn = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # starts a turn: batches of images and labels on the device


class TensorImages(Dataset[tuple[Tensor, int]]):
    """Images as uint8 tensors (C, H, W), each sent through a transform at its access."""

    def __init__(self, images: ImageSet, transform: Callable[[Tensor], Tensor]) -> None:
        self.images, self.labels, self.transform = images.images.permute(0, 3, 1, 2), images.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_data_arguments(parser, dataset="shapes")
    parser.add_argument("--batch-size", type=int, default=500, help="images a batch")
    parser.add_argument("--batches", type=int, default=20, help="batches of each in a round, that are counted")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, after one to warm up")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 2 or settings.batches < 1:
        raise UsageError("a measurement takes at least --rounds 2 of --batches 1")
    data = ImageData(
        settings.dataset,
        root=settings.root,
        batch_size=settings.batch_size,
        val_size=0,
        crop=PADDING,
        flip="random",
        count=settings.count,
    )
    if len(data.train_images) < (settings.batches + 1) * settings.batch_size:
        raise UsageError(f"{len(data.train_images):,} images are less than a round: lower --batches or --batch-size")
    accelerator, devices = choose_devices(detect_machine(), settings.accelerator, 1)
    trainer = pl.Trainer(accelerator=accelerator, devices=devices, logger=False, enable_checkpointing=False)
    device = trainer.strategy.root_device
    speeds = in_turn(sides(data, settings.batches, device), settings.batches, settings.rounds, device)
    figures = figures_of(settings, speeds, device)
    if settings.json:
        write_figures(Path(settings.json), figures)
    channels, height, width = data.input_shape
    show(
        f"bench input · {settings.dataset} {channels}×{height}×{width} · batch {settings.batch_size} · on {device.type}",
        ("", "batches/s", "images/s", "ours is … × as fast"),
        [
            (name, *(shown_spread(found[part], form) for part, form in PARTS.items()), shown_spread(found["ratio"], ".1f"))
            for name, found in figures["sides"].items()
        ],
        f"medians (quartiles) of {settings.rounds} rounds of {settings.batches} batches each, in turn",
        footer(figures),
    )


PARTS = {"batches_per_second": ".1f", "images_per_second": ",.0f"}


def sides(data: ImageData, batches: int, device: torch.device) -> dict[str, Turn]:
    """What is compared, by name; a turn of the DataLoaders ends by itself after one batch more than `batches`."""
    mean, std = data.statistics
    size = data.input_shape[1:]
    crop: dict[str, Any] = {"size": size, "padding": PADDING, "padding_mode": "reflect"}
    pil = transforms.Compose(
        [
            transforms.RandomCrop(**crop),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    tensor = v2.Compose(
        [v2.RandomCrop(**crop), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    )
    pil_images, tensor_images = PilImages(data.train_images, transform=pil), TensorImages(data.train_images, tensor)

    def loading(images: Dataset[tuple[Tensor, int]], workers: int) -> Turn:
        # workers stay alive between turns but idle, as a turn is an epoch of as many images as it takes
        loader = DataLoader(
            images,
            batch_size=data.batch_size,
            sampler=RandomSampler(images, num_samples=(batches + 1) * data.batch_size),  # type: ignore[arg-type]
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type != "cpu",
        )
        return lambda: ((pixels.to(device, non_blocking=True), labels.to(device)) for pixels, labels in loader)

    ours = ((batch.images, batch.labels) for epoch in ready_epochs(data, device) for batch in epoch)  # goes on where it was
    return {
        OURS: lambda: ours,
        WORKERS: loading(pil_images, 2),
        "PIL, DataLoader, no worker": loading(pil_images, 0),
        "v2 on tensors, DataLoader, 2 workers": loading(tensor_images, 2),
    }


def in_turn(turns: dict[str, Turn], batches: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Images a second of each side in each round, the first round, which warms up, left out."""
    speeds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, start in turns.items():
            stream = start()
            next(stream)
            started = read_clock(device)
            images = sum(len(labels) for _, labels in islice(stream, batches))
            seconds = read_clock(device) - started
            if number:
                speeds[name].append(images / seconds)
    return speeds


def figures_of(settings: Namespace, speeds: dict[str, list[float]], device: torch.device) -> dict[str, Any]:
    """The figures from the images a second of each side; ratios are of the same round."""
    found = {
        name: {
            "batches_per_second": spread(value / settings.batch_size for value in values),
            "images_per_second": spread(values),
            "ratio": spread(ours / value for ours, value in zip(speeds[OURS], values, strict=True)),
        }
        for name, values in speeds.items()
    }
    rows = [(name, side["images_per_second"], "images/s") for name, side in found.items()]
    ratio = (f"ours / {WORKERS}", found[WORKERS]["ratio"], "×")
    return {
        "bench": "input",
        "settings": settings_of(settings),
        "environment": environment(),
        **headline(*rows, ratio),
        "device": device.type,
        "sides": found,
    }
