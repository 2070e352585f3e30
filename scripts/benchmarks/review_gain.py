"""Measure what a review of suspected label errors gains: python scripts/benchmarks/review_gain.py --photos flowers."""

from __future__ import annotations

import argparse
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cifar_lit.training.finetune import PACKAGED_NET, fit_head
from next_labels import frozen_features
from script import run_script, set_threads
from torch import Tensor
from torch.nn import functional as F

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.splits import fold_rows, split_validation
from cifar_lit.data.table import read_table
from cifar_lit.errors import UsageError
from cifar_lit.extras.label.journal import Decision
from cifar_lit.extras.label.queue import most_suspicious
from cifar_lit.extras.label.table import Labels
from cifar_lit.models.pretrained import preprocessing
from cifar_lit.stats import mean_interval

WHAT = (
    "Change 5 % of the labels of 2,000 images to another class, drawn uniformly. Cross-validate the last layer of the "
    "recipe finetune on them (--model.unfreeze false --data.val_size 0), on cached features of the frozen net. Correct "
    "the planted errors among the most suspicious 5 % of the images, as a reviewer would. Train on the planted, the "
    "reviewed and the original labels, and test on other images. The sets are CIFAR-10 and a folder of photos."
)
COUNT = 2000  # training images
NOISE = FIRST = 0.05  # shares of wrong labels and of reviewed images
FOLDS = 5
GOAL = 0.8  # share of the planted errors to repair
NOWHERE = Path("/nonexistent")  # a run without margins


class Data(NamedTuple):
    """Features of the frozen net, float16 (N, features), labels and groups, int64 (N,)."""

    features: Tensor
    labels: Tensor
    groups: Tensor | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--photos", metavar="FOLDER", help="a folder with one folder per class")
    parser.add_argument("--image-size", type=int, default=256, help="side of the photos in pixels")
    parser.add_argument("--side", type=int, default=128, help="side to which the net scales images of CIFAR-10")
    parser.add_argument("--test", type=int, default=5000, help="test images of CIFAR-10")
    parser.add_argument("--runs", type=int, default=5, help="number of seeds: splits and planted errors")
    parser.add_argument("--threads", type=set_threads, help="torch's threads")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.runs < 2 or settings.test < 10 or not (settings.root or settings.photos):
        raise UsageError("--runs must be at least 2 and --test at least 10; name images with --photos or --data-dir")
    sets = {}
    if settings.photos:
        sets[Path(settings.photos).name] = photos(settings.photos, settings.image_size)
    if settings.root:
        sets["CIFAR-10"] = cifar(settings.root, settings.side, settings.test)
    progress = Progress(len(sets) * settings.runs, "seed")
    rows: list[Row] = []
    runs: dict[str, list[dict[str, float]]] = {}
    for name, data in sets.items():
        runs[name] = []
        for seed in range(settings.runs):
            runs[name].append(measure(data, seed))
            progress.advance(sum(map(len, runs.values())))
        rows += rows_of(name, runs[name])
    own = {label: value for label, value in vars(settings).items() if label != "photos"}
    lines = ("mean, low and high: mean over the seeds with its 95 % interval by Student's t",)
    publish("review_gain", own, f"reviews of {COUNT:,} images with planted label errors", rows, *lines, runs=runs)


def rows_of(name: str, runs: list[dict[str, float]]) -> list[Row]:
    """Return spread, mean and interval of the mean of each result."""
    rows: list[Row] = []
    for label in runs[0]:
        values = [one[label] for one in runs]
        unit = "points" if label.startswith("gain") else "%"
        mean = mean_interval(values)
        rows.append((f"{name}, {label}", spread(values), unit))
        units = {"mean": unit, "low": "", "high": unit}  # shown as "low … high %"
        rows += [(f"{name}, {label}: {part}", mean[part], units[part]) for part in units]
    return rows


def photos(folder: str, side: int) -> Data:
    """Return all images of a folder. Near-duplicates are one group."""
    data = image_data("folder", folder, folds=FOLDS, image_size=side)
    images = data.train_images
    (features,) = frozen_features(data, None, (images, torch.arange(len(images))))
    return Data(features, images.labels, images.groups)


def cifar(root: str, side: int, test: int) -> Data:
    """Return training images of CIFAR-10, drawn with a fixed seed: enough for COUNT training and `test` test images."""
    data = image_data("cifar10", root)
    images = data.train_images
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[: COUNT + test]
    (features,) = frozen_features(data, side, (images, rows))
    return Data(features, images.labels[rows], None)


def image_data(dataset: str, root: str, **settings: Any) -> ImageData:
    """Return images with the mean and standard deviation of the pretraining."""
    expected = preprocessing(PACKAGED_NET)
    assert expected
    return ImageData(dataset, root=root, mean=expected.mean, std=expected.std, **settings)


def measure(data: Data, seed: int) -> dict[str, float]:
    """Return the results of one seed by label, in percent and percentage points."""
    classes = int(data.labels.max()) + 1
    train, test = split_validation(data.labels, len(data.labels) - COUNT, seed, data.groups)
    features, clean = data.features[train], data.labels[train]
    groups = None if data.groups is None else data.groups[train]
    planted = plant(clean, classes, seed)
    is_wrong = planted != clean

    def predict(rows: Tensor, labels: Tensor, where: Tensor) -> Tensor:
        """Return probabilities for `where`, (N, features), of a last layer fitted to these training rows."""
        weight, bias, _ = fit_head(features[rows], labels[rows], classes, 1)
        return F.linear(where.float(), weight, bias).softmax(1)

    fold = fold_rows(planted, groups, FOLDS, 0)
    held_out = torch.zeros(len(train), classes)
    for number in range(FOLDS):
        held_out[fold == number] = predict(fold != number, planted, features[fold == number])
    orders = {
        "logit margin": most_suspicious(NOWHERE, planted, held_out),
        "probability of the label": held_out.gather(1, planted[:, None])[:, 0].argsort(stable=True),
    }
    first = {name: order[: round(FIRST * len(train))] for name, order in orders.items()}
    values = {"held-out accuracy, planted errors": percent(held_out.argmax(1) == planted)}
    for name, order in orders.items():
        found = is_wrong[order].cumsum(0).double() / is_wrong.sum()
        values[f"repaired, {name}"] = 100 * float(found[len(first[name]) - 1])
        values[f"reviewed images for {100 * GOAL:g} %, {name}"] = 100 * (int((found < GOAL).sum()) + 1) / len(train)
    reviewed = review(planted, clean, first["logit margin"])
    everything = torch.ones(len(train), dtype=torch.bool)
    for name, labels in {"planted errors": planted, "review": reviewed, "original labels": clean}.items():
        hits = predict(everything, labels, data.features[test]).argmax(1) == data.labels[test]
        values[f"test accuracy, {name}"] = percent(hits)
    for name in ("review", "original labels"):
        values[f"gain, {name}"] = values[f"test accuracy, {name}"] - values["test accuracy, planted errors"]
    return values


def percent(values: Tensor) -> float:
    """Return the mean of bools in percent."""
    return 100 * float(values.double().mean())


def plant(clean: Tensor, classes: int, seed: int) -> Tensor:
    """Return labels, int64 (N,), of which the share NOISE was changed to another class."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(clean), generator=generator)[: round(NOISE * len(clean))]
    labels = clean.clone()
    labels[rows] = (clean[rows] + torch.randint(1, classes, (len(rows),), generator=generator)) % classes
    return labels


def review(labels: Tensor, truth: Tensor, rows: Tensor) -> Tensor:
    """Return the labels of the table that a review writes, in which these rows have their true labels."""
    keys, names = [str(row) for row in range(len(labels))], [str(label) for label in labels.tolist()]
    today = date.today().isoformat()
    decisions = {}
    for row in rows.tolist():
        action = "keep" if labels[row] == truth[row] else "relabel"
        decisions[keys[row]] = Decision(keys[row], action, str(int(truth[row])), today, False)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "labels-reviewed.csv")
        Labels("image", keys, names, "", []).write(table, decisions)
        return torch.tensor([int(row.label) for row in read_table(table)])


if __name__ == "__main__":
    raise SystemExit(run_script())
