"""How far a run's scores beyond accuracy can be believed: python scripts/benchmarks/scores.py RUN --outside FOLDER."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
from cifar_lit.runs.label_errors import NEIGHBOURS, find_neighbours, with_votes
from cifar_lit.runs.results import calibration_of
from cifar_lit.runs.run_data import RunData

WHAT = (
    "Of a run with a validation set, on its test images: the calibration error with and without its temperature; the area under "
    "the ROC curve with which novelty and its rivals tell pictures of other folders from them, and how many of them are marked "
    "as unlike; and of labels that are changed at random, how many are among as many images with the least probable labels."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="where its images are, if not where its config.yaml says")
    parser.add_argument("--outside", metavar="FOLDER", nargs="*", default=[], help="of pictures of other things")
    parser.add_argument("--images", type=int, default=2500, help="of each of these folders, and test images beside them")
    parser.add_argument("--changed", type=float, default=0.05, help="share of the test images' labels that is changed")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: pictures, and labels that are changed")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    if settings.images < 1 or not 0 < settings.changed < 1:
        raise UsageError("--images must be at least 1, and --changed above 0 and below 1")
    classifier = cifar_lit.load(settings.run)
    card, data = classifier.card, RunData(Path(settings.run) / "model.safetensors", classifier.card, settings.root)
    if card.temperature is None or card.novelty.get("threshold") is None:
        raise UsageError("this run had no validation images: train one with --data.val_size 0.1")
    generator = torch.Generator().manual_seed(settings.seed)
    test, train = data.load(False, 0), data.load(True, 0)
    logits, embeddings = classifier.logits_and_embeddings(test.images)
    _, known = classifier.logits_and_embeddings(train.images)
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
    inside = _scores(classifier, logits, embeddings)
    marked = float(inside["novelty"].gt(card.novelty["threshold"]).double().mean())
    rows.append(("test images marked as unlike", spread([100 * marked]), "%"))
    some = torch.randperm(len(logits), generator=generator)[: settings.images]
    for folder in map(Path, settings.outside):
        pictures = pictures_in(folder)
        drawn = torch.randperm(len(pictures), generator=generator)[: settings.images].tolist()
        outside = _scores(classifier, *classifier.logits_and_embeddings(classifier.prepare([pictures[row] for row in drawn])))
        for name, scores in outside.items():
            ranked, other = torch.cat((inside[name][some], scores)), torch.arange(len(some) + len(scores)) >= len(some)
            rows.append((f"{folder.name}: {name}", spread([float(binary_auroc(ranked, other.long()))]), ""))
    rows += _label_errors(logits, embeddings, known, (train.labels, test.labels), settings.changed, generator)
    own = {**vars(settings), "run": Path(settings.run).name, "outside": [Path(folder).name for folder in settings.outside]}
    accuracy = float(logits.argmax(1).eq(torch.as_tensor(test.labels)).double().mean())
    publish("scores", own, f"{card.net} · {100 * accuracy:.2f} % of {len(logits):,} test images", rows, "of one net")


def _scores(classifier: Any, logits: Tensor, embeddings: Tensor) -> dict[str, Tensor]:
    """What could tell pictures that are unlike the training images, by name: the higher, the more unlike."""
    tensors, settings = classifier.net.novelty, classifier.card.novelty
    hesitant = Categorical(logits=logits)
    return {
        "novelty": novelty(embeddings, logits, tensors, settings),
        "distance alone": novelty(embeddings, logits, tensors, {**settings, "method": None}),
        "largest probability": -hesitant.probs.amax(1),
        "energy": -logits.logsumexp(1),
        "entropy": hesitant.entropy(),
    }


def _label_errors(
    logits: Tensor, embeddings: Tensor, known: Tensor, labels: tuple[Any, Any], share: float, generator: torch.Generator
) -> list[Row]:
    count, classes = logits.shape
    changed = torch.randperm(count, generator=generator)[: round(share * count)]
    wrong = labels[1].clone()
    wrong[changed] = (wrong[changed] + torch.randint(1, classes, (len(changed),), generator=generator)) % classes
    neighbours = find_neighbours(known, embeddings, NEIGHBOURS, lambda _: None)
    alone = logits.softmax(1)
    rows: list[Row] = []
    for name, said in (("net and neighbours", with_votes(alone, neighbours, labels[0])), ("net alone", alone)):
        suspected = said.gather(1, wrong[:, None])[:, 0].argsort()[: len(changed)]
        found = float(torch.isin(suspected, changed).double().mean())
        rows.append((f"changed labels found by {name}", spread([100 * found]), "%"))
    return rows


if __name__ == "__main__":
    raise SystemExit(run_script())
