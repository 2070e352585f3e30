"""Measure probabilities, rejection and prediction sets of runs: python scripts/benchmarks/scores.py RUN… --outside DIR.

The runs have validation images, and differ only in their seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from report import Row, publish, spread
from script import run_script
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

import cifar_lit
from cifar_lit.base.errors import UsageError
from cifar_lit.data.image_set import spread_rows
from cifar_lit.inference.classify import find_images
from cifar_lit.inference.export import CALIBRATION_IMAGES, Options, write_onnx
from cifar_lit.inference.load import Classifier
from cifar_lit.inference.logits import NetImages, logits_and_embeddings
from cifar_lit.inference.rejection import novelty, threshold
from cifar_lit.inference.sets import LEVELS, SETS, Coverage, held_out_scores, prediction_sets, set_limits
from cifar_lit.run.images import run_image_data
from cifar_lit.run.results import calibration_of

WHAT = (
    "Score runs with validation images on their test images: temperature; calibration error; rejected images at "
    "several false-alarm rates, also of int8 ONNX; AUROC and FPR95 of scores against images of other folders, as in "
    "OpenOOD (Yang et al., 2022); and coverage and size of prediction sets, with limits from a random half of the "
    "validation images, on the other half, and with limits from all of them, on the test images."
)
RATES = (0.01, 0.05, 0.1)
NEIGHBOURS = 50  # OpenOOD's default for KNN
HALVES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--data-dir", dest="root", metavar="PATH", help="folder of the images, if they were moved")
    parser.add_argument("--outside", metavar="DIR", nargs="*", default=[], help="folders of unknown pictures")
    parser.add_argument("--images", type=int, default=2500, help="number of pictures of each folder and of test images")
    parser.add_argument("--int8", action="store_true", help="also reject with int8 ONNX files")


def run(settings: argparse.Namespace) -> None:
    """Measure and report."""
    values: dict[str, list[float]] = {}
    for path in settings.runs:
        for name, value in figures_of_run(settings, path).items():
            values.setdefault(name, []).append(value)
    rows: list[Row] = [(name, spread(each), unit_of(name)) for name, each in values.items()]
    own = {**vars(settings), "outside": [Path(folder).name for folder in settings.outside]}
    del own["runs"]
    publish("scores", own, f"{len(settings.runs)} runs", rows)


def unit_of(name: str) -> str:
    """Return the unit of a figure."""
    if name.startswith(("temperature", "calibration")) or "set size" in name:
        return ""
    return "%"


def figures_of_run(settings: argparse.Namespace, path: str) -> dict[str, float]:
    """Return the figures of a run by name."""
    classifier = cifar_lit.load(path)
    card = classifier.card
    data = run_image_data(Path(path), card, data_dir=settings.root)
    if card.temperature is None or card.reject is None or not len(data.split[1]):
        raise UsageError(f"{path} had no validation images: train one with --data.val_size 0.1")

    def embed(images: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(images))
        return logits_and_embeddings(classifier.net, lambda part: images[part], rows, lambda done: None)

    logits, embeddings = embed(data.test_images.images)
    labels = data.test_images.labels
    tested = {"indices": torch.arange(len(logits)), "labels": labels, "probabilities": logits.double().softmax(1)}
    calibration = calibration_of(tested, card.temperature)
    figures = {
        "accuracy": 100 * float((logits.argmax(1) == labels).double().mean()),
        "temperature": card.temperature,
        "calibration error without temperature": float(calibration["error"] or 0),
        "calibration error with temperature": float(calibration["tempered_error"] or 0),
    }
    energy = novelty(logits)
    for rate in RATES:
        figures[f"rejected at {rate:g}"] = 100 * float((energy > threshold(card.reject, rate)).double().mean())
    if settings.int8:
        train = data.train_images.take(spread_rows(data.split[0], CALIBRATION_IMAGES)).permute(0, 3, 1, 2)
        for rate in RATES:
            unknown = unknown_in_int8(classifier, train.contiguous(), rate, data.test_images.images)
            figures[f"rejected by int8 at {rate:g}"] = 100 * float(unknown.double().mean())
    known = torch.nn.functional.normalize(embed(data.train_images.take(spread_rows(data.split[0], 50_000)))[1])
    inside = scores(logits, embeddings, known)
    some = spread_rows(torch.arange(len(logits)), settings.images)
    for folder in settings.outside:
        files = [file.path for file in find_images([folder], None)]  # type: ignore[arg-type]
        drawn = spread_rows(torch.arange(len(files)), settings.images).tolist()
        pictures = classifier.prepare([files[row] for row in drawn]).permute(0, 2, 3, 1)
        for score, outside in scores(*embed(pictures), known).items():
            own = inside[score][some]
            is_outside = torch.arange(len(own) + len(outside)) >= len(own)
            auroc = binary_auroc(torch.cat((own, outside)), is_outside.long())
            passed = (outside <= own.quantile(0.95)).double().mean()
            figures[f"{Path(folder).name}: AUROC, {score}"] = 100 * float(auroc)
            figures[f"{Path(folder).name}: FPR95, {score}"] = 100 * float(passed)
    held_out = embed(data.train_images.take(data.split[1]))[0]
    probabilities = [(part / card.temperature).softmax(1) for part in (held_out, logits)]
    figures |= coverages(probabilities[0], data.train_images.labels[data.split[1]], probabilities[1], labels)
    return figures


def scores(logits: Tensor, embeddings: Tensor, known: Tensor) -> dict[str, Tensor]:
    """Return scores (N,) by name, higher for images less like the training images.

    known: normalised embeddings of the training images (M, features).
    """
    normalised = torch.nn.functional.normalize(embeddings)
    count = min(NEIGHBOURS, len(known))
    nearest = torch.cat([(part @ known.T).topk(count).values[:, -1] for part in normalised.split(1000)])
    # Liu et al., NeurIPS 2020; Hendrycks and Gimpel, ICLR 2017; Sun et al., ICML 2022.
    return {"energy": novelty(logits), "largest probability": -logits.softmax(1).amax(1), "KNN": -nearest}


def unknown_in_int8(classifier: Classifier, train: Tensor, rate: float, images: Tensor) -> Tensor:
    """Return whether an int8 ONNX file rejects each image, bool (N,). images: uint8 (N, H, W, C)."""
    import onnxruntime

    with TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        write_onnx(classifier.net, path, Options(NetImages(train, None, "training images"), rate))
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answers = []
        for part in images.permute(0, 3, 1, 2).split(500):
            (unknown,) = session.run(["unknown"], {"images": part.contiguous().numpy()})
            answers.append(torch.from_numpy(unknown))
    return torch.cat(answers)


def coverages(held_out: Tensor, held_out_labels: Tensor, tested: Tensor, labels: Tensor) -> dict[str, float]:
    """Return coverage and mean set size in random halves of the held-out images, and on the test images."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(held_out), generator=generator) for _ in range(HALVES)]
    half = len(held_out) // 2
    whole = held_out_scores(held_out, held_out_labels)
    fitted = [held_out_scores(held_out[order[:half]], held_out_labels[order[:half]]) for order in orders]
    figures = {}
    for kind in SETS:
        for by_class in (False, True):
            for level in LEVELS:
                coverage = Coverage(level, kind, by_class)
                name = f"{kind}{' by class' if by_class else ''} at {level:g}"
                try:
                    limits = [set_limits(each, coverage) for each in fitted]
                except UsageError:  # too few images of a class
                    continue
                covered, size = 0.0, 0.0
                for order, own in zip(orders, limits, strict=True):
                    rest = order[half:]
                    hits, sizes = measured(held_out[rest], held_out_labels[rest], own, kind)
                    covered, size = covered + hits / HALVES, size + sizes / HALVES
                figures[f"{name}: coverage in halves"] = 100 * covered
                figures[f"{name}: set size in halves"] = size
                hits, size = measured(tested, labels, set_limits(whole, coverage), kind)
                figures[f"{name}: coverage on the test images"] = 100 * hits
                figures[f"{name}: set size on the test images"] = size
    return figures


def measured(probabilities: Tensor, labels: Tensor, limits: Tensor, kind: str) -> tuple[float, float]:
    """Return coverage and mean size of the sets of images."""
    sets = prediction_sets(probabilities, limits, kind)
    return float(sets.gather(1, labels[:, None]).double().mean()), float(sets.sum(1).double().mean())


if __name__ == "__main__":
    raise SystemExit(run_script())
