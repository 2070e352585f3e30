"""Train on few labelled images of CIFAR-10: python scripts/benchmarks/few_labels.py --runs 3."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from inspect import signature

from imbalance import drawn
from script import run_script
from train_once import StepProgress, run_once

from cifar_lit.bench.process import without_places
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import UsageError
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Train on a few images of CIFAR-10, equally many of each class and drawn anew for each seed; test on the 10,000 "
    "test images. Compared are: the recipe finetune on images scaled to 128 pixels, whole and its last layer alone; "
    "and the recipe folder, a small net from scratch, for 600 steps. The validation images are taken from the few. "
    "Other flags are passed to all trainings."
)
FEW = "cifar10_few_labels"
SCALED = ["--model.net_options={side: 128}"]
WAYS = {
    "last layer": ("finetune", [*SCALED, "--model.unfreeze=false"]),
    "fine-tuned": ("finetune", SCALED),
    "from scratch": ("folder", []),
}
SCRATCH_STEPS = 600
VAL_SHARE = signature(ImageData).parameters["val_size"].default  # held out from training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--images", type=int, nargs="+", default=[100, 1000], help="total number of labelled images")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds of each method")
    parser.add_argument("--way", choices=[*WAYS], action="append", help="method to measure; can be repeated")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.runs < 1 or not all(10 <= images <= 50_000 for images in settings.images):
        raise UsageError("--runs must be at least 1, and --images from 10 to 50,000")
    plans = [
        (seed, images, way)
        for seed in range(settings.runs)
        for images in settings.images
        for way in settings.way or WAYS
    ]
    results: dict[str, list[dict[str, float]]] = {}
    progress = Progress(len(plans), "training")
    with suppress(Interrupted):
        for number, (seed, images, way) in enumerate(plans):
            SOURCES[FEW] = replace(SOURCES["cifar10"], load=cache(partial(drawn, sizes=[images // 10] * 10, seed=seed)))
            recipe, own = WAYS[way]
            if recipe == "folder":
                batch = min(128, round(images * (1 - VAL_SHARE)))
                steps = max(1, round(images * (1 - VAL_SHARE)) // batch)
                own = [*own, f"--batch-size={batch}", f"--epochs={round(SCRATCH_STEPS / steps)}"]
            flags = [
                "--dataset",
                FEW,
                "--devices",
                "1",
                *(["--data-dir", settings.root] if settings.root else []),
                *own,
            ]
            with tempfile.TemporaryDirectory() as cache_dir:  # each method computes its own features
                flags += [f"--data.cache_dir={cache_dir}", *settings.flags]
                done = run_once(recipe, flags, seed, None, StepProgress(progress, number))
            results.setdefault(f"{images:,} images, {way}", []).append(done)
            progress.advance(
                number + 1, f"{images:,} images, {way}: {100 * done['accuracy']:.2f} % in {done['seconds']:.0f} s"
            )
    rows: list[Row] = []
    for name, runs in results.items():
        rows.append((name, spread(100 * one["accuracy"] for one in runs), "%"))
        rows.append((f"{name}: training", spread(one["seconds"] for one in runs), "s"))
    if rows:
        own_settings = {**vars(settings), "flags": without_places(settings.flags)}
        publish("few_labels", own_settings, "CIFAR-10 from few labelled images, tested on 10,000", rows)


if __name__ == "__main__":
    raise SystemExit(run_script())
