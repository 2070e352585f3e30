"""Time limit of the CPU recipes on this machine: python scripts/benchmarks/budget.py --data-dir DATA."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from cifar_lit.data.resolution import side_at
from lightning.pytorch.callbacks import LambdaCallback
from limit import product_rate
from loops import TutorialLoop, lay_out_plainly
from script import run_script
from timed_fit import build

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_precision, detect_machine
from cifar_lit.runs.config_file import plain_values

WHAT = (
    "Measure the seconds of an epoch of the tutorial's loop with its test (all training images, then all test images), "
    "the throughput of this machine in matrix products, and with --recipes the training time of recipes, from steps at "
    "each of their image sizes in turn with the epochs. ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 "
    "MKL_ENABLE_INSTRUCTIONS=AVX2 measures a CPU without AVX-512."
)
PRODUCTS = 15
WARM_UP, STEPS = 2, 5  # training steps at each image size
TUTORIAL = "the tutorial's loop, an epoch with its test"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", default="cifar10", help="shapes for a trial run")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the tutorial's loop")
    parser.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="packaged recipes or YAML files")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.epochs < 1:
        raise UsageError("--epochs must be at least 1")
    own = {"dataset": settings.dataset, "root": settings.root, "val_size": 0}
    cpu = torch.device("cpu")
    precision = choose_precision(detect_machine(), "cpu")[0]
    dtype, text = (torch.bfloat16, "bfloat16") if precision == "bf16-mixed" else (torch.float32, "float32")
    rates = [product_rate(dtype, cpu) / 1e9 for _ in range(PRODUCTS + 1)]
    rows: list[Row] = [(f"matrix product, {text}", spread(rates[1:]), "GFLOP/s")]  # the first one warmed up
    recipe: dict[str, Any] = plain_values(recipe_path("tudui"))
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
    trainings: dict[str, list[float]] = {name: [] for name in settings.recipes}
    epochs = loop.epochs(cpu)
    for number in range(settings.epochs):
        before = time.perf_counter()
        next(epochs)
        seconds.append(time.perf_counter() - before)
        for name, values in trainings.items():
            values.append(training_seconds(name, own, precision))
        progress.advance(number + 1)
    rows.append((TUTORIAL, spread(seconds), "s"))
    for name, values in trainings.items():
        rows.append((f"{name}, a training", spread(values), "s"))
        ratios = [value / (10 * epoch) for value, epoch in zip(values, seconds, strict=True)]
        rows.append((f"{name} / ten epochs of the tutorial's loop", spread(ratios), "×"))
    publish("budget", vars(settings), settings.dataset, rows)


def training_seconds(name: str, own: dict[str, Any], precision: Any) -> float:
    """Return the seconds of all steps of a recipe, from a few steps at each of its image sizes."""
    recipe: dict[str, Any] = plain_values(recipe_path(name))
    epochs, data_settings = recipe["trainer"]["max_epochs"], {**recipe["data"], **own}
    sides = [side_at(data_settings.get("resolutions", {}), epoch, epochs) for epoch in range(epochs)]
    total = 0.0
    for side in dict.fromkeys(sides):
        resolutions = {side: 1.0} if side else {}
        data, model = build(recipe["model"], {**data_settings, "resolutions": resolutions, "skip_easy": 0})
        times = list[float]()
        callback = LambdaCallback(on_train_batch_end=lambda *args, times=times: times.append(time.perf_counter()))
        trainer = L.Trainer(
            accelerator="cpu", precision=precision, max_steps=WARM_UP + STEPS, callbacks=[callback],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        step = (times[-1] - times[WARM_UP - 1]) / STEPS
        total += sides.count(side) * (len(data.split[0]) / data.batch_size) * step
    return total


if __name__ == "__main__":
    raise SystemExit(run_script())
