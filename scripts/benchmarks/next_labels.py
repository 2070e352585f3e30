"""Compare `cifar-lit next` with random choice: python scripts/benchmarks/next_labels.py --photos flowers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cifar_lit.training.finetune import IMAGENET, PACKAGED_NET, compute_features, fit_head, load_pretrained
from script import run_script, set_threads
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, make_parent, publish, spread
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError
from cifar_lit.extras.label.next import select
from cifar_lit.models.registry import build_net
from cifar_lit.runs.compare import COLOURS
from cifar_lit.stats import mean_interval

WHAT = (
    "Label a pool of images step by step, chosen by the function of `cifar-lit next` or at random, from the same first "
    "random images. After each step, fit the last layer on features of the frozen pretrained net, like the recipe "
    "finetune with --model.unfreeze false, and test it. The pools are a part of CIFAR-10 and a folder of photos."
)
SIDE = 128  # pixels
STEPS = (100, 200, 300, 400, 500)  # labelled images
WAYS = ("next", "random")


class Features(NamedTuple):
    """Features of the frozen net, float16 (N, features), and labels, int64 (N,)."""

    pool: Tensor
    pool_labels: Tensor
    test: Tensor
    test_labels: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--photos", metavar="FOLDER", help="a folder with one folder per class")
    parser.add_argument("--pool", type=int, default=4000, help="images of CIFAR-10 to choose from")
    parser.add_argument("--test", type=int, default=5000, help="test images of CIFAR-10")
    parser.add_argument("--runs", type=int, default=5, help="number of seeds")
    parser.add_argument("--plot", metavar="FILE.png", help="file of the plot")
    parser.add_argument("--threads", type=set_threads, help="torch's threads")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.runs < 1 or settings.pool < max(STEPS) or (settings.plot and Path(settings.plot).suffix != ".png"):
        raise UsageError("--runs must be at least 1, --pool at least 500, and --plot a .png file")
    sets = {"CIFAR-10": cifar_features(settings.root, settings.pool, settings.test)}
    if settings.photos:
        sets[Path(settings.photos).name] = photo_features(settings.photos)
    progress = Progress(len(sets) * settings.runs, "seed")
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for name, features in sets.items():
        curves[name] = {way: [] for way in WAYS}
        for seed in range(settings.runs):
            for way in WAYS:
                curves[name][way].append(curve(features, way, seed))
            progress.advance(sum(len(runs[WAYS[-1]]) for runs in curves.values()))
    rows: list[Row] = []
    gains: dict[str, list[Any]] = {}
    for name, runs in curves.items():
        for place, labelled in enumerate(STEPS):
            for way in WAYS:
                rows.append((f"{name}, {labelled} labels, {way}", spread(100 * one[place] for one in runs[way]), "%"))
        for place, labelled in enumerate(STEPS[1:], 1):
            differences = [100 * (ours[place] - other[place]) for ours, other in zip(*runs.values(), strict=True)]
            rows.append((f"{name}, {labelled} labels, next − random", spread(differences), "points"))
            gains.setdefault(name, []).append({"labels": labelled, **mean_interval(differences)})
    own = {name: value for name, value in vars(settings).items() if name != "photos"}
    sizes = {name: {"pool": len(one.pool), "test": len(one.test)} for name, one in sets.items()}
    figures = publish(
        "next_labels", own, "test accuracy by number of labels", rows, sizes=sizes, gains=gains, curves=curves
    )
    if settings.plot:
        make_parent(Path(settings.plot))
        plot(figures, Path(settings.plot))


def cifar_features(root: str | None, pool: int, test: int) -> Features:
    """Return features of CIFAR-10: `pool` training and `test` test images drawn with a fixed seed."""
    data = ImageData("cifar10", root=root, val_size=0)
    rows = [
        torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]
        for images, count in ((data.train_images, pool), (data.test_images, test))
    ]
    return features_of(data, *rows)


def photo_features(folder: str) -> Features:
    """Return features of a folder of photos: 30 % are test images, the others are the pool."""
    data = ImageData("folder", root=folder, val_size=0, test_size=0.3, image_size=SIDE)
    return features_of(data, torch.arange(len(data.train_images)), torch.arange(len(data.test_images)))


def features_of(data: ImageData, pool: Tensor, test: Tensor) -> Features:
    """Return features of these training and test images, int64 rows."""
    train, tested = data.train_images, data.test_images
    pool_features, test_features = frozen_features(data, SIDE, (train, pool), (tested, test))
    return Features(pool_features, train.labels[pool], test_features, tested.labels[test])


def frozen_features(data: ImageData, side: int | None, *parts: tuple[ImageSet, Tensor]) -> list[Tensor]:
    """Return features of some rows of each set, float16 (N, features). side: see `build_timm_net`."""
    channels, height, width = data.input_shape
    shape: dict[str, Any] = {"channels": channels, "image_size": (height, width), "num_classes": data.class_count}
    net = build_net(PACKAGED_NET, **shape, width=1.0, options={"side": side})
    load_pretrained(net, PACKAGED_NET, IMAGENET)
    net.eval().to(memory_format=torch.channels_last)

    def features(images: ImageSet, rows: Tensor) -> Tensor:
        batches = (data.preprocessing.normalise(images.take(part)) for part in rows.split(64))
        with torch.no_grad():
            return compute_features(net, batches, lambda: torch.autocast("cpu", torch.bfloat16), lambda count: None)

    return [features(*part) for part in parts]


def curve(features: Features, way: str, seed: int) -> list[float]:
    """Return the test accuracy after each of STEPS."""
    order = torch.randperm(len(features.pool), generator=torch.Generator().manual_seed(seed))
    labelled, accuracies = order[: STEPS[0]], list[float]()
    classes = int(features.pool_labels.max()) + 1
    for labels, goal in pairwise((*STEPS, None)):
        assert len(labelled) == labels
        weight, bias, _ = fit_head(features.pool[labelled], features.pool_labels[labelled], classes, 1, None)
        hits = F.linear(features.test.float(), weight, bias).argmax(1) == features.test_labels
        accuracies.append(float(hits.double().mean()))
        if goal:
            rest = order[~torch.isin(order, labelled)]
            chosen = torch.arange(goal - labels)
            if way == "next":
                best = F.linear(features.pool[rest].float(), weight, bias).softmax(1).topk(2).values
                chosen = select(best[:, 0] - best[:, 1], features.pool[rest], len(chosen))
            labelled = torch.cat((labelled, rest[chosen]))
    return accuracies


def plot(figures: Any, file: Path) -> None:
    """Plot mean and range over the seeds of each data set as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels: Sequence[Any] = figure.subplots(1, len(figures["curves"]), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, figures["curves"].items(), strict=True):
        for colour, (way, runs) in zip(COLOURS, curves.items(), strict=False):
            values = 100 * torch.tensor(runs, dtype=torch.float64)
            axes.fill_between(STEPS, values.amin(0), values.amax(0), color=colour, alpha=0.18, linewidth=0)
            axes.plot(STEPS, values.mean(0), color=colour, linewidth=1.8, marker="o", markersize=3.5, label=way)
        size = figures["sizes"][name]
        axes.set_title(f"{name}: pool of {size['pool']:,}, {size['test']:,} test images", loc="left", fontsize=10)
        axes.set_xlabel("labelled images")
        axes.set_ylabel("test accuracy, %")
        axes.set_xticks(STEPS)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False, title=f"mean and range, n = {len(runs)}")
    figure.savefig(file, format="png")


if __name__ == "__main__":
    raise SystemExit(run_script())
