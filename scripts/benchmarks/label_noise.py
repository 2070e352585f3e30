"""Compare rankings of likely label errors on planted errors: python scripts/benchmarks/label_noise.py --runs 3."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_lit.data.hard_rounds import LastLosses
from imbalance import drawn
from lightning.pytorch.callbacks import Callback
from script import run_script, set_threads
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import binary_auroc
from train_once import StepProgress, run_once

import cifar_lit
from cifar_lit.bench.process import without_places
from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.sources import SOURCES, SourceSettings
from cifar_lit.data.splits import fold_rows
from cifar_lit.errors import UsageError
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.runs.label_errors import trust
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "Plant label errors in a subset of CIFAR-10, train a recipe on it, and rank the labels in several ways: AUROC of "
    "the planted errors, and their share in the first 5 %. Kinds of errors: 5 % of the labels uniformly; 5 % of the "
    "labels to the class that is confused most; 20 % of the cats labelled dog (scored on the images labelled dog). "
    "Other flags are passed to all trainings."
)
NOISY = "cifar10_noisy"
# Class of CIFAR-10 that each class is confused with most often.
CONFUSED = {"airplane": "ship", "automobile": "truck", "bird": "deer", "cat": "dog", "deer": "horse", "dog": "cat",
            "frog": "cat", "horse": "deer", "ship": "airplane", "truck": "automobile"}  # fmt: skip
PAIR = ("cat", "dog")
KINDS = {"uniform": 0.05, "confusable": 0.05, "pair": 0.2}
FIRST = 0.05  # share of the images whose precision is measured
NEIGHBOURS = 10
FOLDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("--recipe", default="laptop90", help="a packaged recipe, or a YAML file")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of CIFAR-10's archive")
    parser.add_argument("--images", type=int, default=10_000, help="training images, equally many of each class")
    parser.add_argument("--runs", type=int, default=3, help="number of seeds of each kind of errors")
    parser.add_argument("--fold-runs", type=int, default=1, help="number of these seeds that also train five folds")
    parser.add_argument("--threads", type=set_threads, help="torch's threads")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.runs < 1 or not 10 <= settings.images <= 50_000:
        raise UsageError("--runs must be at least 1, and --images from 10 to 50,000")
    flags = ["--dataset", NOISY, "--devices", "1", "--model.tta", "none", "--model.margins", "true", *settings.flags]
    flags += ["--data-dir", settings.root] if settings.root else []
    plans = [
        (seed, kind, fold)
        for seed, kind in product(range(settings.runs), KINDS)
        for fold in range(-1, FOLDS if seed < settings.fold_runs else 0)
    ]
    SOURCES["cifar10"] = replace(SOURCES["cifar10"], load=cache(SOURCES["cifar10"].load))
    source = SourceSettings(root=settings.root)
    results: dict[str, list[float]] = {}
    progress = Progress(len(plans), "training")
    with suppress(Interrupted):
        for number, (seed, kind, fold) in enumerate(plans):
            callback = StepProgress(progress, number)
            if fold < 0:
                clean = drawn(source, True, [settings.images // 10] * 10, seed)
                images = plant(clean, kind, seed)
                test = SOURCES["cifar10"].load(source, False)
                SOURCES[NOISY] = replace(SOURCES["cifar10"], load=partial(either, images, test))
                trained = train(settings.recipe, flags, seed, images, callback, results)
                scores, logits_held_out = rankings(*trained, images.labels), torch.zeros_like(trained[0])
            else:  # score the images of the fold by a net that was not trained on them
                own = [*flags, f"--data.folds={FOLDS}", f"--data.fold={fold}"]
                held_out = fold_rows(images.labels, None, FOLDS, 0) == fold
                logits = train(settings.recipe, own, seed, images, callback, None)[0]
                logits_held_out[held_out] = logits[held_out]
                scores = {
                    f"{name}, held out": values for name, values in net_rankings(logits_held_out, images.labels).items()
                }
            if fold in (-1, FOLDS - 1):
                record(results, kind, scores, images, clean)
            progress.advance(number + 1, f"{kind}, seed {seed}" + (f", fold {fold}" if fold >= 0 else ""))
    units = {"training time": "s", "test accuracy": "%"}
    rows: list[Row] = [
        (name, spread(values), units.get(name, "%" if "precision" in name else "")) for name, values in results.items()
    ]
    if rows:
        own_settings = {**vars(settings), "flags": without_places(settings.flags)}
        publish("label_noise", own_settings, f"planted label errors in {settings.images:,} images of CIFAR-10", rows)


def either(images: ImageSet, test: ImageSet, settings: SourceSettings, train: bool) -> ImageSet:
    """Return the training or test images: the function of a source."""
    return images if train else test


def plant(clean: ImageSet, kind: str, seed: int) -> ImageSet:
    """Return the images with planted label errors."""
    generator = torch.Generator().manual_seed(seed)
    labels, classes = clean.labels.clone(), clean.classes
    rows = torch.arange(len(clean))
    if kind == "pair":
        rows = (labels == classes.index(PAIR[0])).nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=generator)[: round(KINDS[kind] * len(rows))]]
    if kind == "uniform":
        shift = torch.randint(1, len(classes), (len(rows),), generator=generator)
        labels[rows] = (labels[rows] + shift) % len(classes)
    else:
        to = torch.tensor([classes.index(CONFUSED[name]) for name in classes])
        labels[rows] = to[labels[rows]]
    return replace(clean, labels=labels)


class Losses(Callback):
    """Record the last training loss of each image."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start without losses."""
        self.last = LastLosses(len(trainer.datamodule.train_images), pl_module.device)
        self.last.listen(pl_module)


def train(
    recipe: str, flags: list[str], seed: int, images: ImageSet, progress: Callback, results: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and return logits (N, classes), embeddings (N, features), mean margins (N,) and last losses (N,)."""
    losses = Losses()
    with tempfile.TemporaryDirectory() as logs:
        done = run_once(recipe, flags, seed, logs, losses, progress)
        (folder,) = Path(logs).iterdir()
        margins = torch.from_numpy(np.load(folder / "margins.npy"))
        rows = torch.arange(len(images))
        logits, embeddings = logits_and_embeddings(cifar_lit.load(folder), images.take, rows, lambda count: None)
    if results is not None:
        results.setdefault("test accuracy", []).append(100 * done["accuracy"])
        results.setdefault("training time", []).append(done["seconds"])
    return logits, embeddings, margins, losses.last.gather()


def rankings(
    logits: Tensor, embeddings: Tensor, margins: Tensor, losses: Tensor, labels: Tensor
) -> Mapping[str, Tensor]:
    """Return the rankings by name; the lowest value is the most suspicious."""
    features = F.normalize(embeddings - embeddings.mean(0), dim=1)
    agreement = []
    for part in torch.arange(len(labels)).split(1000):
        cosines = features[part] @ features.T
        cosines[torch.arange(len(part)), part] = -2.0  # not its own neighbour
        agreement.append((labels[cosines.topk(NEIGHBOURS).indices] == labels[part][:, None]).double().mean(1))
    neighbours = torch.cat(agreement)
    both = trust(labels, logits.double().softmax(1), margins)
    return {
        **net_rankings(logits, labels),
        "last loss": -losses,
        "labels of neighbours": neighbours,
        "mean margin over the training": margins,
        "both margins": both,
        "both margins and neighbours": 2 * both + quantiles(neighbours),
    }


def net_rankings(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the rankings that need only the logits of a net, by name."""
    probabilities = logits.double().softmax(1)
    return {
        "probability of the label": probabilities.gather(1, labels[:, None])[:, 0],
        "logit margin": trust(labels, probabilities),
    }


def quantiles(values: Tensor) -> Tensor:
    """Return the fraction of smaller values for each value, double (N,)."""
    return torch.searchsorted(values.sort().values, values).double() / len(values)


def record(
    results: dict[str, list[float]], kind: str, scores: Mapping[str, Tensor], images: ImageSet, clean: ImageSet
) -> None:
    """Add AUROC and precision of each ranking to the results."""
    scope = torch.ones(len(images), dtype=torch.bool)
    if kind == "pair":
        scope = images.labels == images.classes.index(PAIR[1])
    planted = (images.labels != clean.labels)[scope]
    for name, values in scores.items():
        ranked = values[scope].double()
        places = ranked.unique(return_inverse=True)[1].float()  # ties are equal
        first = ranked.argsort(stable=True)[: round(FIRST * len(ranked))]
        auroc = float(binary_auroc(1 - places / len(ranked), planted.long()))
        results.setdefault(f"{kind}, {name}: AUROC", []).append(auroc)
        share = float(planted[first].double().mean())
        results.setdefault(f"{kind}, {name}: precision in the first 5 %", []).append(100 * share)


if __name__ == "__main__":
    raise SystemExit(run_script())
