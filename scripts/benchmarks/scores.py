"""Measure the quality of a run's scores beyond accuracy: python scripts/benchmarks/scores.py RUN --outside FOLDER."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from classify import pictures_in
from PIL import Image, ImageDraw
from script import run_script
from torch import Tensor
from torch.distributions import Categorical
from torchmetrics.functional.classification import binary_auroc

import cifar_lit
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.data.image_set import spread_rows
from cifar_lit.errors import UsageError
from cifar_lit.inference.classify import _font
from cifar_lit.inference.embeddings import logits_and_embeddings
from cifar_lit.runs.card import novelty, threshold
from cifar_lit.runs.results import calibration_of
from cifar_lit.runs.run_data import run_image_data

WHAT = (
    "Score a run with a validation set on its test images: calibration error with and without temperature; rejected "
    "test images at several false-alarm rates; area under the ROC curve and false positive rate at 95 % true positives "
    "of scores for unknown images, as in OpenOOD (Yang et al., 2022), against images of other folders, drawn textures "
    "and drawn digits; and share of randomly changed labels among equally many least probable labels."
)
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
NEIGHBOURS = 50  # OpenOOD's default for KNN
SIDE = 64  # pixels of drawn images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--data-dir", dest="root", metavar="PATH", help="folder of its images; default: as in its config.yaml"
    )
    parser.add_argument("--outside", metavar="FOLDER", nargs="*", default=[], help="folders of unknown pictures")
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
    card = classifier.card
    data = run_image_data(Path(settings.run), card, data_dir=settings.root)
    if card.temperature is None or card.reject is None or not len(data.split[1]):
        raise UsageError("this run had no validation images: train one with --data.val_size 0.1")
    generator = torch.Generator().manual_seed(settings.seed)

    def embed(images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and embeddings of uint8 images (N, H, W, C)."""
        return logits_and_embeddings(
            classifier, lambda rows: images[rows], torch.arange(len(images)), lambda done: None
        )

    known = torch.nn.functional.normalize(embed(data.train_images.take(spread_rows(data.split[0], 50_000)))[1])
    logits, embeddings = embed(data.test_images.images)
    labels = torch.as_tensor(data.test_images.labels)
    scored = {"indices": torch.arange(len(logits)), "labels": labels, "probabilities": logits.double().softmax(1)}
    calibration = calibration_of(scored, card.temperature)
    rows: list[Row] = [
        ("calibration error without temperature", spread([float(calibration["error"] or 0)]), ""),
        ("calibration error with temperature", spread([float(calibration["tempered_error"] or 0)]), ""),
    ]
    inside = scores(logits, embeddings, known, card.temperature)
    for rate in RATES:
        rejected = novelty(logits).gt(threshold(card.reject, rate)).double().mean()
        rows.append((f"rejected test images at --reject {rate:g}", spread([100 * float(rejected)]), "%"))
    outside: dict[str, Tensor] = {}
    for folder in map(Path, settings.outside):
        pictures = pictures_in(folder)
        drawn = torch.randperm(len(pictures), generator=generator)[: settings.images].tolist()
        outside[folder.name] = classifier.prepare([pictures[row] for row in drawn])
    draw = np.random.default_rng(settings.seed)
    for name, function in {"drawn textures": texture, "drawn digits": digits}.items():
        outside[name] = classifier.prepare([function(draw) for _ in range(settings.images)])
    some = torch.randperm(len(logits), generator=generator)[: settings.images]
    for name, images in outside.items():
        found = embed(images.permute(0, 2, 3, 1))
        for score, values in scores(*found, known, card.temperature).items():
            ranked, other = torch.cat((inside[score][some], values)), torch.arange(len(some) + len(values)) >= len(some)
            rows.append((f"{name}: AUROC, {score}", spread([100 * float(binary_auroc(ranked, other.long()))]), "%"))
            missed = float(values.le(inside[score][some].quantile(0.95)).double().mean())
            rows.append((f"{name}: FPR95, {score}", spread([100 * missed]), "%"))
        rejected = novelty(found[0]).gt(threshold(card.reject, 0.05)).double().mean()
        rows.append((f"{name}: rejected at --reject 0.05", spread([100 * float(rejected)]), "%"))
    recall = _changed_labels_found(logits, labels, settings.changed, generator)
    rows.append(("changed labels found by net alone", spread([100 * recall]), "%"))
    own = {
        **vars(settings),
        "run": Path(settings.run).name,
        "outside": [*outside],
    }
    accuracy = float(logits.argmax(1).eq(labels).double().mean())
    publish("scores", own, f"{card.net} · {100 * accuracy:.2f} % of {len(logits):,} test images", rows, "of one net")


def scores(logits: Tensor, embeddings: Tensor, known: Tensor, temperature: float) -> dict[str, Tensor]:
    """Return scores (N,) by name; higher for images less like the training images.

    Args:
        logits: (N, classes).
        embeddings: (N, features).
        known: normalised embeddings of the training images (M, features).
        temperature: divisor of the logits.
    """
    normalised = torch.nn.functional.normalize(embeddings)
    count = min(NEIGHBOURS, len(known))
    nearest = torch.cat([(part @ known.T).topk(count).values[:, -1] for part in normalised.split(1000)])
    return {
        "largest probability": -logits.softmax(1).amax(1),  # MSP: Hendrycks and Gimpel, ICLR 2017
        "largest probability at the temperature": -(logits / temperature).softmax(1).amax(1),
        "energy": novelty(logits),  # Liu et al., NeurIPS 2020
        "energy at the temperature": -temperature * (logits / temperature).logsumexp(1),
        "entropy at the temperature": Categorical(logits=logits / temperature).entropy(),
        "KNN": -nearest,  # Sun et al., ICML 2022: the distance falls with the cosine
    }


def texture(draw: np.random.Generator) -> Image.Image:
    """Draw stripes, checks or blurred noise in two colours."""
    grid = np.mgrid[:SIDE, :SIDE] / SIDE
    angle, frequency, phase = draw.uniform(0, np.pi), draw.uniform(2, 12), draw.uniform(0, 2 * np.pi)
    wave = np.sin(2 * np.pi * frequency * (grid[0] * np.sin(angle) + grid[1] * np.cos(angle)) + phase)
    across = np.sin(2 * np.pi * frequency * (grid[0] * np.cos(angle) - grid[1] * np.sin(angle)))
    cells = draw.normal(size=(int(draw.integers(4, 32)),) * 2).astype(np.float32)
    noise = np.asarray(Image.fromarray(cells).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    pattern = (wave, np.sign(wave * across), noise)[draw.integers(3)] + 0.2 * draw.normal(size=(SIDE, SIDE))
    mix = np.clip(0.5 + 0.5 * pattern, 0, 1)[..., None]
    colours = draw.uniform(0, 255, (2, 3))
    return Image.fromarray((mix * colours[0] + (1 - mix) * colours[1]).astype(np.uint8))


def digits(draw: np.random.Generator) -> Image.Image:
    """Draw one to three digits in one colour on another, as on house numbers."""
    colours = [tuple(draw.integers(0, 256, 3).tolist()) for _ in range(2)]
    image = Image.new("RGB", (SIDE, SIDE), colours[0])
    text = str(draw.integers(0, 10 ** draw.integers(1, 4)))
    size = int(draw.integers(24, 56))
    font = _font().font_variant(size=size)
    place = (SIDE / 2 + draw.uniform(-8, 8), SIDE / 2 + draw.uniform(-8, 8))
    ImageDraw.Draw(image).text(place, text, fill=colours[1], font=font, anchor="mm")
    return image.rotate(draw.uniform(-15, 15), Image.Resampling.BICUBIC, fillcolor=colours[0])


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
