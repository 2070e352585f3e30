"""Compare our batches with torchvision's transforms in a DataLoader: python scripts/benchmarks/input.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from loops import ArrayImages, batches_on_device, leave_signals
from PIL import Image
from progress import Progress
from script import run_script
from timed_fit import add_data_arguments, read_clock
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor, v2

from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.augment import Augment
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_devices, detect_machine
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Compare training images/s, cropped out of 4 pixels of padding, flipped, normalised and on the device: ours, "
    "torchvision's transforms as in tutorials (zero padding, PIL, a DataLoader with 0 and with 2 workers), its v2 "
    "transforms on tensors in such a DataLoader, and on whole batches. All take turns in one process; the first batch"
    " of a turn is not timed."
)
PADDING = 4
OURS, WHOLE = "ours", "v2 on whole batches"
Stream = Iterator[tuple[Tensor, Tensor]]  # yields images and labels on the device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    add_data_arguments(parser, dataset="shapes")
    parser.add_argument("--batch-size", type=int, default=500, help="images in a batch")
    parser.add_argument("--batches", type=int, default=10, help="timed batches in a round")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, after one that warms up")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    size = settings.batch_size
    if min(settings.rounds, settings.batches, size) < 1:
        raise UsageError("--rounds, --batches and --batch-size must be at least 1")
    own = {"batch_size": size, "val_size": 0, "augment": Augment("random", PADDING), "count": settings.count}
    data = ImageData(settings.dataset, root=settings.root, **own)
    if len(data.train_images) < (settings.batches + 1) * size:
        raise UsageError(f"{len(data.train_images):,} images are too few for a round: lower --batches or --batch-size")
    accelerator, devices = choose_devices(detect_machine(), settings.accelerator, 1)
    device = pl.Trainer(
        accelerator=accelerator, devices=devices, logger=False, enable_checkpointing=False
    ).strategy.root_device
    progress = Progress(settings.rounds + 1, "round")
    turns = sides(data, settings.batches, device)
    rounds: list[dict[str, float]] = []
    with suppress(Interrupted):
        for number in range(settings.rounds + 1):
            speeds = {name: images_per_second(start(), settings.batches, device) for name, start in turns.items()}
            if number:  # the first round warms up
                rounds.append(speeds)
            progress.advance(number + 1)
    if not rounds:
        return
    values = {name: spread(speeds[name] for speeds in rounds) for name in turns}
    rivals = sorted((name for name in turns if name not in (OURS, WHOLE)), key=lambda name: -values[name]["median"])
    ratios = {name: spread(speeds[OURS] / speeds[name] for speeds in rounds) for name in turns}
    rows: list[Row] = [("ours / the strongest rival", ratios[rivals[0]], "×")]
    rows += [(name, value, "images/s") for name, value in values.items()]
    rows += [(f"ours / {name}", ratios[name], "×") for name in (*rivals, WHOLE)]
    publish(
        "input",
        vars(settings),
        f"{settings.dataset} {'×'.join(map(str, data.input_shape))} · batch {size} · on {device.type}",
        rows,
        f"{len(rounds)} rounds of {settings.batches} batches each, in turn",
        f"the strongest rival is {rivals[0]}; {WHOLE} does not count, because it moves all images of a batch alike",
        device=device.type,
        strongest=rivals[0],
    )


def images_per_second(stream: Stream, batches: int, device: torch.device) -> float:
    """Return the speed of a turn without its first batch."""
    next(stream)
    started = read_clock(device)
    images = sum(len(labels) for _, labels in islice(stream, batches))
    return images / (read_clock(device) - started)


class TensorImages(ArrayImages):
    """The same images as uint8 tensors (C, H, W)."""

    def __init__(self, images: ImageSet, transforms: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(images, transforms)
        self.arrays = images.images.permute(0, 3, 1, 2).contiguous()


def sides(data: ImageData, batches: int, device: torch.device) -> dict[str, Callable[[], Stream]]:
    """Return the functions that start a turn, by name. A rival's turn ends after `batches` + 1 batches."""
    size, count = data.batch_size, (batches + 1) * data.batch_size
    crop: dict[str, Any] = {"size": data.input_shape[1:], "padding": PADDING}
    pil = ArrayImages(
        data.train_images,
        [Image.fromarray, RandomCrop(**crop), RandomHorizontalFlip(), ToTensor(), Normalize(*data.statistics)],
    )
    as_floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*data.statistics)]
    on_tensors = [v2.RandomCrop(**crop), v2.RandomHorizontalFlip(), *as_floats]
    tensors = TensorImages(data.train_images, on_tensors)

    def loading(images: ArrayImages, workers: int) -> Callable[[], Stream]:
        loader = DataLoader(
            images,
            batch_size=size,
            sampler=RandomSampler(images, num_samples=count),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type != "cpu",
            worker_init_fn=leave_signals,
        )
        return lambda: ((pixels.to(device, non_blocking=True), labels.to(device)) for pixels, labels in loader)

    def whole_batches() -> Stream:
        move, labels = Compose(on_tensors), data.train_images.labels
        for rows in torch.randperm(len(labels))[:count].split(size):
            yield move(tensors.arrays[rows]).to(device), labels[rows].to(device)

    ours = ((batch.images, batch.labels) for epoch in batches_on_device(data, device) for batch in epoch)
    return {
        OURS: lambda: ours,  # one stream for all turns
        "PIL, 2 workers": loading(pil, 2),
        "PIL, no worker": loading(pil, 0),
        "v2 on tensors, 2 workers": loading(tensors, 2),
        WHOLE: whole_batches,
    }


if __name__ == "__main__":
    raise SystemExit(run_script())
