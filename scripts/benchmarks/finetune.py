"""Fine-tuning on own photos beside a hand-written loop: python scripts/benchmarks/finetune.py PHOTOS --runs 5."""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from script import run_script
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import default_loader
from torchvision.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

from cifar_lit.bench.process import FinishedTraining, train, without_places
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.folder import draw_test, scan
from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.stats import wilson_interval
from cifar_lit.training.finetune import PACKAGED_NET, load_pretrained

WHAT = (
    "Fine-tunes the recipe finetune on a folder of photos, from nothing (not even decoded images) to the tested net, beside the "
    "loop of PyTorch's transfer learning tutorial with the same net and weights: Resize, RandomResizedCrop and flip of PIL "
    "images in a DataLoader of two workers, batches of 4, SGD at 0.001 with momentum 0.9, a tenth of it after every 7 epochs, a "
    "new last layer; the best of its epochs on the tested images counts. In turns, each in a process of its own. What "
    "is not listed here goes to our training. With --folds, only our training is cross-validated."
)
MEAN = STD = [0.5, 0.5, 0.5]  # as this net was trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("folder", metavar="PHOTOS", help="one folder a class, or train/ and val/ with these")
    parser.add_argument("--runs", type=int, default=1, help="seeds")
    parser.add_argument("--epochs", type=int, default=25, help="of the hand-written loop; the tutorial makes 25")
    parser.add_argument(
        "--folds", type=int, default=0, help="of a cross-validation of ours over all images, instead of the loop"
    )


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.runs < 1 or settings.epochs < 1 or settings.folds < 0 or settings.folds == 1:
        raise UsageError("a measurement takes at least --runs 1 and --epochs 1, and --folds 2 if any")
    rows, images = cross_validate(settings) if settings.folds else compare(settings)
    own = {**vars(settings), "folder": Path(settings.folder).name, "flags": without_places(settings.flags)}
    publish("finetune", own, f"{own['folder']}, {images} test images", rows)


def compare(settings: argparse.Namespace) -> tuple[list[Row], int]:
    """The rows about ours and the hand-written loop, and the number of test images."""
    values: dict[str, list[float]] = {
        name: [] for name in ("ours", "hand-written loop", "ours, all", "hand-written loop, all")
    }
    progress = Progress(2 * settings.runs, "training")
    for seed in range(settings.runs):
        ours = train_ours(settings, ["--seed", str(seed)])
        accuracy = ours.metrics["test"]["accuracy"]
        values["ours"].append(100 * accuracy)
        values["ours, all"].append(ours.seconds)
        progress.advance(2 * seed + 1, f"ours {100 * accuracy:.2f} % in {ours.seconds:.0f} s")
        begun = time.perf_counter()
        with ProcessPoolExecutor(
            1, get_context("spawn")
        ) as pool:  # unlike multiprocessing's, its loaders may have workers
            accuracy = pool.submit(by_hand, settings.folder, settings.epochs, seed, torch.get_num_threads()).result()
        values["hand-written loop"].append(100 * accuracy)
        values["hand-written loop, all"].append(time.perf_counter() - begun)
        progress.advance(2 * seed + 2, f"by hand {100 * accuracy:.2f} %")
    rows: list[Row] = [(name, spread(found), "s" if "all" in name else "%") for name, found in values.items()]
    ratios = [ours / theirs for ours, theirs in zip(values["ours, all"], values["hand-written loop, all"], strict=True)]
    return [*rows, ("ours / hand-written loop, seconds", spread(ratios), "×")], ours.metrics["test"]["images"]


def cross_validate(settings: argparse.Namespace) -> tuple[list[Row], int]:
    """The rows about a cross-validation, in which each image is tested on once, and the number of images."""
    progress, accuracies, seconds, right, images = Progress(settings.folds, "fold"), [], [], 0, 0
    for fold in range(settings.folds):
        ours = train_ours(settings, [f"--data.folds={settings.folds}", f"--data.fold={fold}"])
        test = ours.metrics["test"]
        accuracies.append(100 * test["accuracy"])
        seconds.append(ours.seconds)
        right, images = right + round(test["accuracy"] * test["images"]), images + test["images"]
        progress.advance(fold + 1, f"{accuracies[-1]:.2f} % in {ours.seconds:.0f} s")
    low, high = wilson_interval(right, images)
    rows: list[Row] = [("each fold", spread(accuracies), "%"), ("all images", 100 * right / images, "%")]
    bounds: list[Row] = [("all images, interval from", 100 * low, "%"), ("all images, interval to", 100 * high, "%")]
    return [*rows, *bounds, ("a training, all", spread(seconds), "s")], images


def train_ours(settings: argparse.Namespace, flags: list[str]) -> FinishedTraining:
    """A training from nothing, not even decoded images."""
    with tempfile.TemporaryDirectory() as cache:
        own = ["--recipe", "finetune", "--data-dir", settings.folder, f"--data.cache_dir={cache}"]
        return train([*own, *flags, *settings.flags])


class Photos(Dataset[tuple[Any, int]]):
    """Files with their labels, opened and transformed at each access, as torchvision's ImageFolder does."""

    def __init__(self, files: list[tuple[str, int]], transform: Compose) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        return self.transform(default_loader(path)), label


def by_hand(folder: str, epochs: int, seed: int, threads: int) -> float:
    """The tutorial's loop; the test accuracy."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    root = Path(folder)
    listing = scan(root)
    parts = listing.parts
    if "all" in parts:  # near-duplicates are not looked for
        parts = draw_test(parts["all"], listing.groups, [], 0.2, 0, f"below {root}")
    normalise = [ToTensor(), Normalize(MEAN, STD)]
    moves = {
        "train": Compose([RandomResizedCrop(224), RandomHorizontalFlip(), *normalise]),
        "test": Compose([Resize(256), CenterCrop(224), *normalise]),
    }
    sets = []
    for name, move in (("train", moves["train"]), ([*parts][-1], moves["test"])):
        files = [
            (str(root / file.path), label) for label, members in enumerate(parts[name].values()) for file in members
        ]
        sets.append(Photos(files, move))
    train_set, test_set = sets
    loaders = DataLoader(train_set, 4, shuffle=True, num_workers=2), DataLoader(test_set, 4, num_workers=2)
    net = build_net(PACKAGED_NET, channels=3, image_size=224, num_classes=len(parts["train"]))
    load_pretrained(net, PACKAGED_NET, "imagenet")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    best = 0.0
    for _ in range(epochs):
        net.train()
        for images, labels in loaders[0]:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
        schedule.step()
        best = max(best, evaluate(net, loaders[1]))
    return best


def evaluate(net: nn.Module, loader: DataLoader[Any]) -> float:
    """The share of images that are named right."""
    net.eval()
    with torch.no_grad():
        hits = [net(images).argmax(1) == labels for images, labels in loader]
    return float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    raise SystemExit(run_script())
