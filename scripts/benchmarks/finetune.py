"""Compare fine-tuning with a hand-written loop: python scripts/benchmarks/finetune.py PHOTOS --runs 5."""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from cifar_lit.training.finetune import PACKAGED_NET, load_pretrained
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
from cifar_lit.data.folder import draw_test
from cifar_lit.data.layout import scan
from cifar_lit.errors import UsageError
from cifar_lit.models.registry import build_net
from cifar_lit.stats import wilson_interval

WHAT = (
    "Run the recipe finetune on a folder of photos, with an empty cache, up to the tested net. Compare it with the "
    "loop of PyTorch's transfer learning tutorial with the same net and weights: Resize, RandomResizedCrop and flip "
    "of PIL images in a DataLoader of two workers, batches of 4, SGD at 0.001 with momentum 0.9, divided by 10 every "
    "7 epochs, a new last layer. Of the tutorial's loop the best epoch on the tested images counts. Both take turns "
    "in separate processes. Other flags are passed to our training. With --folds, only our training runs, as a "
    "cross-validation."
)
MEAN = STD = [0.5, 0.5, 0.5]  # used in pretraining


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument(
        "folder", metavar="PHOTOS", help="a folder with one folder per class, or with train/ and val/ of these"
    )
    parser.add_argument("--runs", type=int, default=1, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=25, help="epochs of the hand-written loop; 25 in the tutorial")
    parser.add_argument("--folds", type=int, default=0, help="cross-validate ours over all images instead")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.runs < 1 or settings.epochs < 1 or settings.folds < 0 or settings.folds == 1:
        raise UsageError("--runs and --epochs must be at least 1, and --folds at least 2 if given")
    rows, images = cross_validate(settings) if settings.folds else compare(settings)
    own = {**vars(settings), "folder": Path(settings.folder).name, "flags": without_places(settings.flags)}
    publish("finetune", own, f"{own['folder']}, {images} test images", rows)


def compare(settings: argparse.Namespace) -> tuple[list[Row], int]:
    """Compare ours with the hand-written loop; return the rows and the number of test images."""
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
        before = time.perf_counter()
        # Unlike the processes of multiprocessing.Pool, these may start loader workers.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            accuracy = pool.submit(by_hand, settings.folder, settings.epochs, seed, torch.get_num_threads()).result()
        values["hand-written loop"].append(100 * accuracy)
        values["hand-written loop, all"].append(time.perf_counter() - before)
        progress.advance(2 * seed + 2, f"by hand {100 * accuracy:.2f} %")
    rows: list[Row] = [(name, spread(runs), "s" if "all" in name else "%") for name, runs in values.items()]
    ratios = [ours / theirs for ours, theirs in zip(values["ours, all"], values["hand-written loop, all"], strict=True)]
    return [*rows, ("ours / hand-written loop, seconds", spread(ratios), "×")], ours.metrics["test"]["images"]


def cross_validate(settings: argparse.Namespace) -> tuple[list[Row], int]:
    """Cross-validate, so that each image is tested once; return the rows and the number of images."""
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
    """Train with an empty cache of decoded images."""
    with tempfile.TemporaryDirectory() as cache:
        own = ["--recipe", "finetune", "--data-dir", settings.folder, f"--data.cache_dir={cache}"]
        return train([*own, *flags, *settings.flags])


class Photos(Dataset[tuple[Any, int]]):
    """Files and labels, opened and transformed on each access, as in torchvision's ImageFolder."""

    def __init__(self, files: list[tuple[str, int]], transform: Compose) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        return self.transform(default_loader(path)), label


def by_hand(folder: str, epochs: int, seed: int, threads: int) -> float:
    """Run the tutorial's loop; return the best test accuracy of its epochs."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    root = Path(folder)
    listing = scan(root)
    parts = listing.parts
    if "all" in parts:  # without a search for near-duplicates
        parts = draw_test(parts["all"], listing.groups, [], 0.2, 0, f"below {root}")
    normalise = [ToTensor(), Normalize(MEAN, STD)]
    transforms = {
        "train": Compose([RandomResizedCrop(224), RandomHorizontalFlip(), *normalise]),
        "test": Compose([Resize(256), CenterCrop(224), *normalise]),
    }
    sets = []
    for name, transform in (("train", transforms["train"]), ([*parts][-1], transforms["test"])):
        files = [
            (str(root / file.path), label) for label, members in enumerate(parts[name].values()) for file in members
        ]
        sets.append(Photos(files, transform))
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
    """Return the accuracy."""
    net.eval()
    with torch.no_grad():
        hits = [net(images).argmax(1) == labels for images, labels in loader]
    return float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    raise SystemExit(run_script())
