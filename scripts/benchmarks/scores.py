"""Measure the quality of a run's scores beyond accuracy: python scripts/benchmarks/scores.py RUN --outside FOLDER."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from classify import pictures_in
from script import run_script
from torch import Tensor
from torch.distributions import Categorical
from torchmetrics.functional.classification import binary_auroc

import cifar_lit
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.errors import UsageError
from cifar_lit.inference.novelty import novelty
from cifar_lit.runs.results import calibration_of
from cifar_lit.runs.run_data import RunData

WHAT = (
    "Score a run with a validation set on its test images: calibration error with and without temperature; area under "
    "the ROC curve of novelty (energy) and other scores against images of other folders; share of test images that is "
    "flagged as out-of-distribution; and share of randomly changed labels among equally many least probable labels."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--data-dir", dest="root", metavar="PATH", help="folder of its images; default: as in its config.yaml"
    )
    parser.add_argument(
        "--outside", metavar="FOLDER", nargs="*", default=[], help="folders of out-of-distribution pictures"
    )
    parser.add_argument(
        "--images", type=int, default=2500, help="number of pictures of each folder, and of test images"
    )
    parser.add_argument("--changed", type=float, default=0.05, help="share of test labels to change")
    parser.add_argument("--seed", type=int, default=0, help="seed of pictures and changed labels")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    if settings.images < 1 or not 0 < settings.changed < 1:
        raise UsageError("--images must be at least 1, and --changed above 0 and below 1")
    classifier = cifar_lit.load(settings.run)
    card, data = classifier.card, RunData(Path(settings.run) / "model.safetensors", classifier.card, settings.root)
    if card.temperature is None or card.novelty_threshold is None:
        raise UsageError("this run had no validation images: train one with --data.val_size 0.1")
    generator = torch.Generator().manual_seed(settings.seed)
    test = data.load(False, 0)
    logits = classifier(test.images)
    scored = {
        "indices": torch.arange(len(logits)),
        "labels": torch.as_tensor(test.labels),
        "probabilities": logits.double().softmax(1),
    }
    calibration = calibration_of(scored, card.temperature)
    rows: list[Row] = [
        ("calibration error without temperature", spread([float(calibration["error"] or 0)]), ""),
        ("calibration error with temperature", spread([float(calibration["tempered_error"] or 0)]), ""),
    ]
    inside = _scores(logits)
    marked = float(inside["energy"].gt(card.novelty_threshold).double().mean())
    rows.append(("test images marked as unlike", spread([100 * marked]), "%"))
    some = torch.randperm(len(logits), generator=generator)[: settings.images]
    for folder in map(Path, settings.outside):
        pictures = pictures_in(folder)
        drawn = torch.randperm(len(pictures), generator=generator)[: settings.images].tolist()
        outside = _scores(classifier(classifier.prepare([pictures[row] for row in drawn])))
        for name, scores in outside.items():
            ranked, other = torch.cat((inside[name][some], scores)), torch.arange(len(some) + len(scores)) >= len(some)
            rows.append((f"{folder.name}: {name}", spread([float(binary_auroc(ranked, other.long()))]), ""))
    recall = _changed_labels_found(logits, torch.as_tensor(test.labels), settings.changed, generator)
    rows.append(("changed labels found by net alone", spread([100 * recall]), "%"))
    own = {
        **vars(settings),
        "run": Path(settings.run).name,
        "outside": [Path(folder).name for folder in settings.outside],
    }
    accuracy = float(logits.argmax(1).eq(torch.as_tensor(test.labels)).double().mean())
    publish("scores", own, f"{card.net} · {100 * accuracy:.2f} % of {len(logits):,} test images", rows, "of one net")


def _scores(logits: Tensor) -> dict[str, Tensor]:
    """Return novelty scores (N,) by name; higher means less like the training images."""
    distribution = Categorical(logits=logits)
    return {
        "energy": novelty(logits),
        "largest probability": -distribution.probs.amax(1),
        "entropy": distribution.entropy(),
    }


def _changed_labels_found(logits: Tensor, labels: Tensor, share: float, generator: torch.Generator) -> float:
    """Change a share of the labels at random; return the fraction of them among as many least probable labels."""
    count, classes = logits.shape
    changed = torch.randperm(count, generator=generator)[: round(share * count)]
    wrong = labels.clone()
    wrong[changed] = (wrong[changed] + torch.randint(1, classes, (len(changed),), generator=generator)) % classes
    suspected = logits.softmax(1).gather(1, wrong[:, None])[:, 0].argsort()[: len(changed)]
    return float(torch.isin(suspected, changed).double().mean())


if __name__ == "__main__":
    raise SystemExit(run_script())
