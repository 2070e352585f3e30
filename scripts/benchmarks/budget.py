"""Compare the FLOPs of recipes with the machine's throughput: python scripts/benchmarks/budget.py --data-dir DATA."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from loops import TutorialLoop, lay_out_plainly
from script import run_script
from timed_fit import build
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.data.resolution import side_at
from cifar_lit.errors import UsageError

WHAT = (
    "Measure three values: the seconds of an epoch of the tutorial's loop with its test (all training images, then "
    "all test images); the floating-point operations of a whole training of each recipe, by torch's counter; and the "
    "highest throughput of this machine, in a product of two bfloat16 matrices (2,048 × 2,048)."
)
SIDE = 2048  # rows and columns of the matrices
PRODUCTS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["laptop", "fast94"],
        metavar="NAME",
        help="recipes whose nets take any image size",
    )
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the tutorial's loop")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.epochs < 1:
        raise UsageError("--epochs must be at least 1")
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0}
    rows: list[Row] = [("matrix product, bfloat16", spread(product_rates()), "GFLOP/s")]
    for name in settings.recipes:
        rows.append((f"{name}, a training", training_operations(name, own) / 1e12, "TFLOP"))
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
    for number, _ in enumerate(islice(loop.epochs(torch.device("cpu")), settings.epochs)):
        seconds.append(time.perf_counter() - before)
        progress.advance(number + 1)
        before = time.perf_counter()
    rows.append(("the tutorial's loop, an epoch with its test", spread(seconds), "s"))
    publish("budget", vars(settings), settings.dataset, rows)


def product_rates() -> list[float]:
    """Return the GFLOP/s of consecutive matrix products, without the first three."""
    first, second = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(PRODUCTS + 3):
        before = time.perf_counter()
        first @ second
        rates.append(2e-9 * SIDE**3 / (time.perf_counter() - before))
    return rates[3:]


def training_operations(name: str, own: dict[str, Any]) -> float:
    """Return the floating-point operations of all forward and backward passes of a recipe, at its image sizes."""
    recipe: dict[str, Any] = recipe_settings(recipe_path(name))
    data, model = build(recipe["model"], {**recipe["data"], **own})
    channels, height, _ = data.input_shape
    epochs, total = recipe["trainer"]["max_epochs"], 0.0
    resolutions = {int(side): share for side, share in (recipe["data"].get("resolutions") or {}).items()}
    for epoch in range(epochs):
        side = side_at(resolutions, epoch, epochs) or height
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(torch.randn(2, channels, side, side)), torch.zeros(2, dtype=torch.int64)).backward()
        total += counter.get_total_flops() / 2 * len(data.split[0])
    return total


if __name__ == "__main__":
    raise SystemExit(run_script())
