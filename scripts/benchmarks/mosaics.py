"""Several labels on mosaics of four pictures of CIFAR-10, beside a plain PyTorch loop: mosaics.py DATA --json FILE."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from report import Row, figures_of, publish, spread, write_figures
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multilabel_average_precision

from cifar_lit.base.text import note
from cifar_lit.data.augment import Augment
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.sources import SOURCES, Source
from cifar_lit.models.registry import build_net
from cifar_lit.runs.label_errors import rank_labels
from cifar_lit.training.classifier import ImageClassifier

WHAT = (
    "Train a small CNN on 12,500 mosaics of 64 px, each of four pictures of CIFAR-10 with up to four classes, with "
    "ImageClassifier and with a hand-written loop: same net, optimizer, rates, flips, precision and epochs. Then drop "
    "5 % of the labels and add as many, train on each half, and count the changed labels in the first tenth of the "
    "list that the other half's net gives."
)
LR, DECAY, BATCH = 0.02, 0.01, 128
NOISE = 0.05


def run(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("root", metavar="DATA", help="CIFAR-10 as published")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--runs", type=int, default=3, help="number of seeds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to this file")
    settings = parser.parse_args(argv)
    source = ImageData("cifar10", settings.root)
    train, test = mosaics(source.train_images), mosaics(source.test_images)
    kept = {**vars(settings), "mosaics": [len(train), len(test)], "noise": NOISE}
    runs: list[dict[str, float]] = []
    for seed in range(settings.runs):
        one: dict[str, float] = {}
        started = time.perf_counter()
        probabilities, one["ours"] = ours(train, test, settings.epochs, seed)
        one["ours, seconds"] = time.perf_counter() - started
        peer = multilabel_average_precision(probabilities, test.labels.long(), len(test.classes))
        one["difference from torchmetrics"] = abs(float(peer) - one["ours"])
        started = time.perf_counter()
        one["loop"] = plain_loop(train, test, settings.epochs, seed)
        one["loop, seconds"] = time.perf_counter() - started
        one["found"] = found(train, settings.epochs, seed)
        runs.append(one)
        note(f"seed {seed}: {one}")
        if settings.json:
            write_figures(settings.json, figures_of("mosaics", kept, rows_of(runs), runs=runs))
    publish("mosaics", kept, rows_of(runs), runs=runs)


def rows_of(runs: list[dict[str, float]]) -> list[Row]:
    """Return the figures of all seeds."""
    names = {
        "ours": "mean average precision", "ours, seconds": "training and test",
        "loop": "plain loop: mean average precision", "loop, seconds": "plain loop: training and test",
        "found": "changed labels in the first tenth of the list",
    }  # fmt: skip
    rows: list[Row] = []
    for name, text in names.items():
        is_time = name.endswith("seconds")
        values = [one[name] if is_time else 100 * one[name] for one in runs]
        rows.append((text, spread(values), "s" if is_time else "%"))
    return rows


def mosaics(images: ImageSet) -> ImageSet:
    """Return mosaics of four pictures each, every picture in one."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).view(-1, 4)
    pixels = images.images[order.flatten()].view(-1, 2, 2, *images.images.shape[1:])
    height, width = 2 * pixels.shape[3], 2 * pixels.shape[4]
    pixels = pixels.transpose(2, 3).reshape(len(order), height, width, -1)
    labels = F.one_hot(images.labels[order], len(images.classes)).amax(1).float()
    return ImageSet(pixels.contiguous(), labels, images.classes)


def ours(train: ImageSet, test: ImageSet, epochs: int, seed: int) -> tuple[Tensor, float]:
    """Return the probabilities of the test images and their mean average precision."""
    SOURCES["mosaics"] = Source(lambda settings, is_train: train if is_train else test)
    L.seed_everything(seed, verbose=False)
    data = ImageData("mosaics", batch_size=BATCH, val_size=0, augment=Augment(flip="random"), seed=seed)
    options: dict[str, Any] = {"optimizer": "adamw", "optimizer_options": {"weight_decay": DECAY}}
    # The loop has torch's schedule, which also cycles the momentum, unlike `one_cycle`.
    options |= {"schedule": "torch.optim.lr_scheduler.OneCycleLR", "schedule_options": {"max_lr": LR}}
    model = ImageClassifier("shapenet", lr=LR, **options)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=epochs, precision="bf16-mixed", enable_model_summary=False, **quiet)
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    assert model.score is not None
    assert model.predictions is not None
    return model.predictions["probabilities"], model.score.values["mean_average_precision"]


def plain_loop(train: ImageSet, test: ImageSet, epochs: int, seed: int) -> float:
    """Return the mean average precision of a hand-written loop on the same images."""
    torch.manual_seed(seed)
    count, side = len(train), train.input_shape[1]
    images, tests = (part.images.permute(0, 3, 1, 2).float() / 255 for part in (train, test))
    std, mean = torch.std_mean(images, (0, 2, 3), keepdim=True)
    images, tests = (images - mean) / std, (tests - mean) / std
    net = build_net("shapenet", channels=3, image_size=(side, side), num_classes=len(train.classes))
    optimizer = torch.optim.AdamW(net.parameters(), LR, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=epochs * -(-count // BATCH))
    for _ in range(epochs):
        for rows in torch.randperm(count).split(BATCH):
            batch = images[rows]
            is_flipped = torch.rand(len(rows)) < 0.5
            batch[is_flipped] = batch[is_flipped].flip(3)
            with torch.autocast("cpu"):
                loss = F.binary_cross_entropy_with_logits(net(batch), train.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        logits = torch.cat([net(batch) for batch in tests.split(500)])
    return float(multilabel_average_precision(logits.sigmoid(), test.labels.long(), len(test.classes)))


def found(images: ImageSet, epochs: int, seed: int) -> float:
    """Return the share of changed labels in the first tenth of the list of suspected pairs of image and label."""
    generator = torch.Generator().manual_seed(seed)
    has = images.labels == 1
    change_rate = torch.where(has, NOISE, NOISE * float(has.sum() / (~has).sum()))
    changed = torch.rand(has.shape, generator=generator) < change_rate
    noisy = ImageSet(images.images, (has ^ changed).float(), images.classes)
    halves = torch.arange(len(images)).chunk(2)
    first, second = (noisy.subset(rows) for rows in halves)
    train = partial(ours, epochs=epochs, seed=seed)
    probabilities = torch.cat((train(second, first)[0], train(first, second)[0]))
    ranking = rank_labels(noisy.labels, probabilities)
    top = ranking.rows[: len(ranking.rows) // 10]
    return float(changed.flatten()[top].sum() / changed.sum())


if __name__ == "__main__":
    run()
