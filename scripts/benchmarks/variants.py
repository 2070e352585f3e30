"""Train variants of a recipe for equal processor time: python scripts/benchmarks/variants.py variants.json."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from loops import leave_signals
from progress import Progress
from script import run_script
from timed_fit import build
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.cli.flags import recipe_path
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.preprocessing import normalise, shrink
from cifar_lit.errors import UsageError
from cifar_lit.features.resolutions import side_at
from cifar_lit.hardware import choose_precision, detect_machine
from cifar_lit.memory import keep_freed_memory
from cifar_lit.models.tta import view_logits
from cifar_lit.runs.config_file import plain_values
from cifar_lit.text import duration_text, note
from cifar_lit.training.optimizers import build_optimizer
from cifar_lit.training.orderly_stop import Interrupted
from cifar_lit.training.schedules import Schedule

WHAT = (
    'Train a recipe and variants of it from a JSON file such as {"narrow": {"model": {"net_options": {"widths": [32, '
    "128, 128]}}}}. Each runs in a process of one thread, two at a time, until each has used the same processor "
    "seconds, which do not depend on other load. Learning rate and image size follow the share of this time. The "
    "variants are compared on 10,000 held-out training images; the test set is not used. Besides settings of a "
    'recipe, a variant may have "skip": {"skip": [0.3, 0.4]} skips in each epoch, from 40 % of the time on, the 30 % '
    "of the images with the lowest last loss."
)
HELD_OUT = 10_000
PARTS = 1000  # steps in which the image size can change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("file", metavar="FILE.json", help="variants by name; {} is the unchanged recipe")
    parser.add_argument("--recipe", default="laptop", help="recipe to vary")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--dataset", help="default: the recipe's")
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="processor seconds of each; two threads need half as long"
    )
    parser.add_argument("--runs", type=int, default=1, help="number of seeds of each variant")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.seconds <= 0 or settings.runs < 1:
        raise UsageError("--seconds must be more than 0, and --runs at least 1")
    try:
        changes = json.loads(Path(settings.file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{settings.file} cannot be read as JSON: {error}") from None
    recipe = plain_values(recipe_path(settings.recipe))
    own = {"data": {name: value for name in ("root", "dataset") if (value := getattr(settings, name))}}
    plans = [(name, seed) for seed, name in product(range(settings.runs), changes)]
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in changes}
    progress = Progress(len(plans), "training")
    duration = duration_text(settings.seconds * len(plans) / 2)
    note(f"this takes about {duration}: {settings.seconds:g} s of a processor for each of {len(plans)} trainings")
    parts = [(name, settings.seconds, merged(merged(recipe, own), changes[name]), seed) for name, seed in plans]
    with get_context("spawn").Pool(2, leave_signals, (0,), maxtasksperchild=1) as pool, suppress(Interrupted):
        for number, (name, one) in enumerate(pool.imap_unordered(train, parts)):
            results[name].append(one)
            progress.advance(number + 1, f"{name} {100 * one[0]:.2f} %")
    rows: list[Row] = []
    for name, same in results.items():
        for label, values in zip(("", ", mirrored views", ", epochs"), zip(*same, strict=True), strict=False):
            factor, unit = (1, "") if "epochs" in label else (100, "%")
            rows.append((f"{name}{label}", spread(factor * value for value in values), unit))
    if rows:
        title = f"{settings.recipe}, {settings.seconds:g} s of a processor each, {HELD_OUT:,} held-out training images"
        publish("variants", {**vars(settings), "file": Path(settings.file).name, "changes": changes}, title, rows)


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` updated with `changes`; nested dictionaries are merged, except the `sides` of resolutions."""
    both = dict(settings)
    for name, value in changes.items():
        old = settings.get(name)
        both[name] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) and name != "sides" else value
        )
    return both


def train(part: tuple[str, float, dict[str, Any], int]) -> tuple[str, tuple[float, float, float]]:
    """Train one variant, given as (name, seconds, settings, seed).

    Returns:
        The name and a tuple: held-out accuracy, the same with mirrored views, number of epochs.
    """
    name, seconds, settings, seed = part
    torch.set_num_threads(1)
    keep_freed_memory()
    sides = (settings.get("resolutions") or {}).get("sides", {})
    resolutions = {int(side): share for side, share in sides.items()}
    data, model = build(settings["model"], {**settings["data"], "val_size": HELD_OUT, "seed": seed})
    torch.manual_seed(seed)
    hparams, epochs = model.hparams, settings["trainer"]["max_epochs"]
    net = type(model)(**hparams).net.to(memory_format=torch.channels_last)
    net.initialise(data.plain_images(5000))  # type: ignore[operator]
    precision = choose_precision(detect_machine(), "cpu")[0]
    bf16 = "bf16" in precision
    options = hparams["optimizer_options"]
    optimizer = build_optimizer(net, hparams["optimizer"], hparams["lr"], options, precision=precision)
    options = hparams["schedule_options"] or {}
    warmup, final = options.get("warmup_epochs", 0.0) / epochs, options.get("final_lr", 0.0)
    schedule = Schedule(optimizer, hparams["schedule"], 1.0, warmup, final)
    if bias_epochs := (settings.get("whitening") or {}).get("bias_epochs"):
        schedule.end_early("whitening", bias_epochs / epochs)
    constants = torch.tensor(data.statistics)
    images, rows = 0, data.split[0]
    skipped, after = settings.get("skip", (0.0, 1.0))
    losses = torch.full((len(data.train_images),), float("inf"))  # last loss of each image
    start = time.process_time()

    def spent_share() -> float:
        return (time.process_time() - start) / seconds

    def select_rows() -> Tensor:
        if spent_share() < after:
            return rows
        return rows[losses[rows].argsort(descending=True)[: round((1 - skipped) * len(rows))]]

    for pixels, labels, trained_on in batches(data, select_rows):
        spent = spent_share()
        if spent >= 1:
            break
        side = side_at(resolutions, int(PARTS * spent), PARTS)
        for group, rate, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = float(rate) * factor(spent)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = net(normalise(shrink(pixels, side) if side else pixels, *constants))
        each = F.cross_entropy(logits, labels, label_smoothing=hparams["label_smoothing"], reduction="none")
        losses[trained_on] = each.detach().float()
        each.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        images += len(labels)
    net.eval()
    hits = torch.zeros(2, dtype=torch.long)
    for held_out in data.split[1].split(500):
        pixels, labels = normalise(data.train_images.images[held_out], *constants), data.train_images.labels[held_out]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hits += torch.stack(
                [(view_logits(net, pixels, views).argmax(1) == labels).sum() for views in ("none", "mirror")]
            )
    plain, mirror = (hits / len(data.split[1])).tolist()
    return name, (plain, mirror, images / len(rows))


def batches(data: ImageData, select_rows: Callable[[], Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield uint8 images (B, H, W, C), labels (B,) and rows (B,) endlessly. Each epoch begins with `select_rows`."""
    for epoch in count():
        data.parts.split = select_rows(), data.split[1]
        loader: Any = data.train_dataloader()
        loader.set_epoch(epoch)
        for batch in loader:
            yield batch.images, batch.labels, batch.indices


if __name__ == "__main__":
    raise SystemExit(run_script())
