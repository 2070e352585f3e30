"""Time limit of the CPU recipes on this machine: python scripts/benchmarks/budget.py --data-dir DATA."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from limit import product_rate
from loops import TutorialLoop, lay_out_plainly
from script import run_script
from timed_fit import build

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.errors import UsageError

WHAT = (
    "Measure the seconds of an epoch of the tutorial's loop with its test (all training images, then all test images), "
    "and the throughput of this machine in matrix products in bfloat16."
)
PRODUCTS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the tutorial's loop")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.epochs < 1:
        raise UsageError("--epochs must be at least 1")
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0}
    cpu = torch.device("cpu")
    rates = [product_rate(torch.bfloat16, cpu) / 1e9 for _ in range(PRODUCTS + 1)]
    rows: list[Row] = [("matrix product, bfloat16", spread(rates[1:]), "GFLOP/s")]  # the first one warmed up
    recipe: dict[str, Any] = recipe_settings(recipe_path("tudui"))
    data, model = build(recipe["model"], {**recipe["data"], **own})
    train, test = data.train_images, data.test_images
    both = replace(
        train,
        images=torch.cat((train.images, test.images)),
        labels=torch.cat((train.labels, test.labels)),
        mapped=False,
    )
    lay_out_plainly(model.net)
    split = torch.arange(len(train)), torch.arange(len(train), len(both))
    loop = TutorialLoop(both, split, model.net, data.batch_size, recipe["model"]["lr"])
    progress, seconds = Progress(settings.epochs, "epoch"), []
    before = time.perf_counter()
    for number, _ in enumerate(islice(loop.epochs(cpu), settings.epochs)):
        seconds.append(time.perf_counter() - before)
        progress.advance(number + 1)
        before = time.perf_counter()
    rows.append(("the tutorial's loop, an epoch with its test", spread(seconds), "s"))
    publish("budget", vars(settings), settings.dataset, rows)


if __name__ == "__main__":
    raise SystemExit(run_script())
