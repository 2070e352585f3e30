"""Measure class weights and balanced sampling on unequal classes: python scripts/benchmarks/imbalance.py --runs 5."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import product

import torch
from script import run_script
from train_once import StepProgress, run_once

from cifar_lit.bench.process import without_places
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.sources import SOURCES, SourceSettings
from cifar_lit.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Train a recipe on long-tailed CIFAR-10 (exponentially decreasing class sizes as in Cui et al., 2019), drawn anew "
    "for each seed: unchanged, with class weights, and with balanced sampling. The last weights are tested on the "
    "balanced test set of 10,000 images. Other flags are passed to the training."
)
LONG_TAILED = "cifar10_long_tailed"
WAYS = {
    "as it is": [],
    "class weights balanced": ["--model.class_weights", "balanced"],
    "class weights effective": ["--model.class_weights", "effective"],
    "sampling balanced": ["--data.sampling", "balanced"],
}
FIGURES = {"balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--recipe", default="quickstart", help="a packaged recipe, or a YAML file")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--ratio", type=float, default=100.0, help="ratio of the largest to the smallest class")
    parser.add_argument("--images", type=int, default=5000, help="images of the largest class")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each training")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds of each method")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.runs < 1 or settings.ratio < 1 or not settings.ratio <= settings.images <= 5000:
        raise UsageError(
            "--runs and --ratio must be at least 1, and --images between --ratio and the 5,000 that a class has"
        )
    sizes = class_sizes(settings.images, settings.ratio)
    flags = ["--dataset", LONG_TAILED, "--epochs", str(settings.epochs), "--devices", "1", "--data.val_size", "0"]
    flags += [*(["--data-dir", settings.root] if settings.root else []), *settings.flags]
    plans = list(product(range(settings.runs), WAYS))
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    progress = Progress(len(plans), "training")
    with suppress(Interrupted):
        for number, (seed, way) in enumerate(plans):
            SOURCES[LONG_TAILED] = replace(SOURCES["cifar10"], load=cache(partial(drawn, sizes=sizes, seed=seed)))
            done = run_once(settings.recipe, [*flags, *WAYS[way]], seed, None, StepProgress(progress, number))
            results[way].append(done)
            progress.advance(number + 1, f"{way} {100 * done['balanced_accuracy']:.2f} %")
    rows: list[Row] = [
        (f"{way}: {text}", spread(100 * one[name] for one in runs), "%")
        for way, runs in results.items()
        for name, text in FIGURES.items()
        if runs
    ]
    if rows:
        own = {**vars(settings), "flags": without_places(settings.flags)}
        counts = ", ".join(map(str, sizes))
        publish(
            "imbalance", own, f"{settings.recipe} on CIFAR-10 1:{settings.ratio:g}", rows, f"training images: {counts}"
        )


def class_sizes(images: int, ratio: float) -> list[int]:
    """Return the class sizes, a geometric series whose last class is `ratio` times smaller than the first."""
    return [int(images * ratio ** (-place / 9)) for place in range(10)]


def drawn(settings: SourceSettings, train: bool, sizes: Sequence[int], seed: int) -> ImageSet:
    """Load CIFAR-10 with `sizes` training images per class, drawn by seed, and the whole test set."""
    whole = SOURCES["cifar10"].load(settings, train)
    if not train:
        return whole
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    per_class = [order[whole.labels[order] == label][:size] for label, size in enumerate(sizes)]
    rows = torch.cat(per_class).sort().values
    return replace(whole, images=whole.images[rows], labels=whole.labels[rows])


if __name__ == "__main__":
    raise SystemExit(run_script())
