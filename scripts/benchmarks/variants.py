"""Changes of a recipe, each trained for the same processor time: python scripts/benchmarks/variants.py variants.json."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from script import run_script
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.bench.training import build
from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.data.augment import normalise
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.resolution import shrink
from cifar_lit.errors import UsageError
from cifar_lit.hardware import detect_machine
from cifar_lit.models.tta import view_logits
from cifar_lit.training.callbacks import Interrupted
from cifar_lit.training.optimizers import GROUP_SETTINGS, build_optimizer
from cifar_lit.training.schedules import schedule_factor

WHAT = (
    "Trains a recipe, and changes of it from a JSON file such as "
    '{"narrow": {"model": {"net_options": {"widths": [32, 128, 128]}}}}, each in a process of one thread, two of them at a time, '
    "until each has had the same seconds of a processor, which other work does not shorten; rates and sizes of images follow the "
    "share of it that is spent. The 10,000 training images that they are compared on are left out; the test set is left alone."
)
HELD_OUT = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("file", metavar="FILE.json", help="the changes by name; {} by itself is the recipe as it is")
    parser.add_argument("--recipe", default="laptop", help="what is changed")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="where CIFAR-10's archive is")
    parser.add_argument("--dataset", help="the recipe's if not given")
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="of a processor for each; two threads do as much in half of them"
    )
    parser.add_argument("--runs", type=int, default=1, help="seeds of each")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.seconds <= 0 or settings.runs < 1:
        raise UsageError("--seconds must be more than 0, and --runs at least 1")
    try:
        changes = json.loads(Path(settings.file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{settings.file} cannot be read as JSON: {error}") from None
    recipe = recipe_settings(recipe_path(settings.recipe))
    own = {"data": {name: value for name in ("root", "dataset") if (value := getattr(settings, name))}}
    plans = [(name, seed) for seed, name in product(range(settings.runs), changes)]
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in changes}
    progress = Progress(len(plans), "training")
    progress.announce(
        settings.seconds * len(plans) / 2, f"{settings.seconds:g} s of a processor for each of {len(plans)} trainings"
    )
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool, suppress(Interrupted):
        work = partial(train, settings.seconds)
        parts = {pool.submit(work, merged(merged(recipe, own), changes[name]), seed): name for name, seed in plans}
        for number, done in enumerate(as_completed(parts)):
            results[parts[done]].append(done.result())
            progress.advance(number + 1, f"{parts[done]} {100 * results[parts[done]][-1][0]:.2f} %")
    rows: list[Row] = []
    for name, same in results.items():
        for label, values in zip(("", ", mirrored views", ", epochs"), zip(*same, strict=True), strict=False):
            factor, unit = (1, "") if "epochs" in label else (100, "%")
            rows.append((f"{name}{label}", spread(factor * value for value in values), unit))
    if rows:
        title = f"{settings.recipe}, {settings.seconds:g} s of a processor each, {HELD_OUT:,} held-out training images"
        publish("variants", {**vars(settings), "file": Path(settings.file).name, "changes": changes}, title, rows)


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `changes` in place of what they name; dictionaries in both are merged, but for `resolutions`."""
    both = dict(settings)
    for name, value in changes.items():
        old = settings.get(name)
        both[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) and name != "resolutions" else value
    return both


def train(seconds: float, settings: Mapping[str, Any], seed: int) -> tuple[float, float, float]:
    """Accuracy, with mirrored views, of held-out images, and epochs."""
    torch.set_num_threads(1)
    resolutions = {int(side): share for side, share in (settings["data"].get("resolutions") or {}).items()}
    data, model = build(settings["model"], {**settings["data"], "val_size": HELD_OUT, "resolutions": None, "seed": seed})
    torch.manual_seed(seed)
    net = type(model)(**model.hparams).net.to(memory_format=torch.channels_last)
    net.initialise(data.plain_images(5000))  # type: ignore[operator]
    own = {name: model.hparams[name] for name in GROUP_SETTINGS if name not in ("optimizer", "lr")}
    bf16 = detect_machine().bf16
    optimizer = build_optimizer(
        net, model.hparams["optimizer"], model.hparams["lr"], precision="bf16-mixed" if bf16 else "32-true", **own
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule, smoothing = model.hparams["schedule"], model.hparams["label_smoothing"]
    constants = torch.tensor(data.statistics)
    images = 0
    begun = time.process_time()
    for pixels, labels in batches(data):
        spent = (time.process_time() - begun) / seconds
        if spent >= 1:
            break
        ends = [(side, sum(list(resolutions.values())[: place + 1])) for place, side in enumerate(resolutions)]
        side = next((side for side, end in ends if spent < end), None)
        factor = schedule_factor(schedule, spent, 1.0, 0.0, model.hparams["final_lr"])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = net(normalise(shrink(pixels, side) if side else pixels, *constants))
        F.cross_entropy(logits, labels, label_smoothing=smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()
        images += len(labels)
    net.eval()
    hits = torch.zeros(2, dtype=torch.long)
    for rows in data.split[1].split(500):
        pixels, labels = normalise(data.train_images.images[rows], *constants), data.train_images.labels[rows]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hits += torch.stack([(view_logits(net, pixels, views).argmax(1) == labels).sum() for views in ("none", "mirror")])
    plain, mirror = (hits / len(data.split[1])).tolist()
    return plain, mirror, images / len(data.split[0])


def batches(data: ImageData) -> Iterator[tuple[Tensor, Tensor]]:
    """uint8 images (B, H, W, C) and labels, epoch after epoch."""
    loader: Any = data.train_dataloader()
    for epoch in count():
        loader.set_epoch(epoch)
        for batch in loader:
            yield batch.images, batch.labels


if __name__ == "__main__":
    raise SystemExit(run_script())
