"""`cifar-lit bench novelty`: ways to tell images that are unlike those of a training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor
from torch.nn.functional import normalize

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, significant, write_figures
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.errors import UsageError
from cifar_lit.hardware import resolve_device
from cifar_lit.inference.load import Classifier, load
from cifar_lit.inference.novelty import FALSE_ALARMS, NEIGHBOUR, choose, learn_novelty, novelty

WHAT = (
    "Ways to tell images of another kind from those that a net was trained on: the area under the ROC curve between a run's "
    "test images and the others, and, at the threshold that marks 5 percent of held-out images, the shares of test images "
    "marked (false alarms) and of others not marked (misses). The first method of the table is the one that `classify` uses."
)
OURS = "nearest neighbours"


class Seen(NamedTuple):
    """What a net makes of some images: logits (N, classes), embeddings (N, features)."""

    logits: Tensor
    embeddings: Tensor


Score = Callable[[Seen], Tensor]  # (N,), more for images that are less alike


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("runs", type=str, nargs="+", help="run folders")
    parser.add_argument("--other", type=str, default="shapes", help="data set of the images of another kind")
    parser.add_argument("--other-dir", type=str | None, default=None, help="its folder")
    parser.add_argument("--count", type=int, default=10_000, help="images of either kind, at most")
    parser.add_argument("--accelerator", type=str, default="auto", help="gpu, cpu or auto")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    device = resolve_device(settings.accelerator)
    found = {Path(name).name: measure(Path(name), settings, device) for name in settings.runs}
    names = {"runs": list(found)}
    rows = [
        (f"{run}, {settings.other}: {label}", float(entry["methods"][OURS][key]), unit)
        for run, entry in found.items()
        for label, key, unit in (("AUROC", "auroc", ""), ("false alarms", "false_alarms", ""), ("misses", "misses", ""))
    ]
    kept = {name: value for name, value in settings_of(settings).items() if name != "other_dir"}
    figures = {"bench": "novelty", "settings": {**kept, **names}, "environment": environment(), **headline(*rows), "runs": found}
    if settings.json:
        write_figures(Path(settings.json), figures)
    other = settings.other
    for run, entry in found.items():
        known = f"{entry['known']:,} training images, threshold from {entry['held_out']:,} held out of {entry['source']}"
        show(
            f"bench novelty · {run} · {entry['test']:,} test images of {entry['dataset']}, {entry['other']:,} of {other}",
            ("method", "AUROC", "false alarms", "misses"),
            [
                (name, f"{method['auroc']:.4f}", f"{method['false_alarms']:.1%}", f"{method['misses']:.1%}")
                for name, method in entry["methods"].items()
            ],
            f"compared with {known} · learnt in {entry['seconds']:.2f} s",
        )
    print(footer(figures))


def measure(folder: Path, settings: Namespace, device: str) -> dict[str, Any]:
    """The figures of one run; raises UsageError where its data are not to be had."""
    classifier = load(folder, device)
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())["data"]
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        raise UsageError(f"{folder} has no config.yaml that says what it was trained on") from None
    data = ImageData(**config)
    height, channels = classifier.size[0], classifier.channels
    other = ImageData(
        settings.other, root=settings.other_dir, image_size=height, channels=channels, count=5 * settings.count
    ).test_images
    train, (known, held_out, source) = data.train_images, choose(*data.split)
    started = time.perf_counter()
    learn_novelty(classifier.logits_and_embeddings, train.images, *data.split)
    seconds = time.perf_counter() - started
    methods = methods_of(_seen(classifier, train, known), train.labels[known])
    parts = (
        _seen(classifier, train, held_out),
        _seen(classifier, data.test_images, _some(data.test_images, settings.count)),
        _seen(classifier, other, _some(other, settings.count)),
    )
    return {
        "dataset": data.dataset,
        "net": classifier.card.net,
        "known": len(known),
        "held_out": len(held_out),
        "source": source,
        "test": len(parts[1].logits),
        "other": len(parts[2].logits),
        "seconds": significant(seconds),
        "methods": {name: rates(*(score(part) for part in parts)) for name, score in methods.items()},
    }


def methods_of(known: Seen, labels: Tensor) -> dict[str, Score]:
    """The methods by name, made from training images with their labels int64 (N,)."""
    z = known.embeddings.double()
    means = torch.stack([z[labels == label].mean(0) for label in labels.unique()])
    mean = z.mean(0)
    within = _precision(z - means[torch.searchsorted(labels.unique(), labels)])
    overall = _precision(z - mean)
    tensors, near = {"known": normalize(known.embeddings).half()}, {"neighbour": NEIGHBOUR}

    def mahalanobis(seen: Seen) -> Tensor:
        """Lee et al. (2018): squared distance to the nearest class mean, by the covariance within classes."""
        return torch.stack([_squared(seen.embeddings.double() - centre, within) for centre in means], 1).min(1).values

    return {
        OURS: lambda seen: novelty(seen.embeddings, tensors, near),  # Sun et al. (2022)
        "max softmax": lambda seen: 1 - seen.logits.softmax(1).max(1).values,  # Hendrycks & Gimpel (2017)
        "energy": lambda seen: -seen.logits.logsumexp(1),  # Liu et al. (2020)
        "Mahalanobis": mahalanobis,
        # Ren et al. (2021): less the distance to the mean of all, by the covariance of all
        "relative Mahalanobis": lambda seen: mahalanobis(seen) - _squared(seen.embeddings.double() - mean, overall),
    }


def rates(held_out: Tensor, test: Tensor, other: Tensor) -> dict[str, float]:
    """`auroc`, and `false_alarms` and `misses` at the threshold that `held_out` gives, from scores (N,) each."""
    threshold = held_out.quantile(1 - FALSE_ALARMS)
    return {
        "auroc": significant(auroc(test, other)),
        "false_alarms": significant(float((test > threshold).double().mean())),
        "misses": significant(float((other <= threshold).double().mean())),
    }


def auroc(low: Tensor, high: Tensor) -> float:
    """The probability that a score of `high` is above one of `low`, equal ones counted as half."""
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high).double() + torch.searchsorted(ordered, high, right=True).double()
    return float(below.mean() / 2 / len(low))


def _precision(centred: Tensor) -> Tensor:
    """The inverse covariance of rows (N, features) about 0, held up by a thousandth of their mean variance."""
    covariance = centred.T @ centred / len(centred)
    return torch.linalg.inv(covariance + 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=centred.dtype))


def _squared(centred: Tensor, precision: Tensor) -> Tensor:
    return (centred @ precision * centred).sum(1)


def _some(images: ImageSet, count: int) -> Tensor:
    """Indices of at most `count` images, drawn, as classes may follow each other."""
    return torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count].sort().values


def _seen(classifier: Classifier, images: ImageSet, chosen: Tensor) -> Seen:
    return Seen(*classifier.logits_and_embeddings(images.images[chosen].permute(0, 3, 1, 2)))
