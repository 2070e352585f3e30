"""`report.html`: one file about a run, with its pictures inside, that asks for nothing from anywhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.progress import progress
from cifar_lit.runs.figures import GALLERY_SIZE, Bin, Picture, confusion_matrix, data_uri, line_chart, reliability_diagram
from cifar_lit.runs.label_errors import Findings, inspect_labels, nearest_embeddings
from cifar_lit.runs.predictions import PredictionTable, fingerprint, prediction_table, read_predictions
from cifar_lit.runs.run_folder import display_path, read_curves, read_metrics

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

MAX_TABLE_CLASSES = 20  # up to which the confusion matrix is a table; beyond, a picture
IMAGES_AT_ONCE = 2048  # between two looks at the clock
PARTS = ("train", "val", "test")  # whose curves share a chart: `val/loss` is drawn beside `train/loss`
FIRST_CHARTS = ("loss", "accuracy", "lr", "weight_norm")  # the others follow as they were logged
TITLES = {"lr": "learning rate", "weight_norm": "weight norm"}

Look = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images (B, C, H, W) to logits (B, classes) and embeddings (B, features)


@dataclass(frozen=True)
class Content:
    """What a page is about.

    images: the test set, uint8 (N, H, W, C). metrics, config, curves: of metrics.json, config.yaml and metrics.csv, as far as
    there are any. commands: what they do, and what to type. findings: None where the training images were not looked at.
    """

    title: str
    classes: Sequence[str]
    predictions: PredictionTable
    images: Tensor
    metrics: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    curves: Sequence[Mapping[str, float]] = ()
    commands: Sequence[tuple[str, str]] = ()
    findings: Findings | None = None


# ---- From a run to a page's content.


def run_content(run: Path, metrics: Mapping[str, Any], data: ImageData, predictions: PredictionTable) -> Content:
    """A page's content without a look at the training images."""
    config = run / "config.yaml"
    commands = []
    if config.is_file():
        commands.append(("The training and its test", f"cifar-lit train --config {shlex.quote(display_path(config))}"))
    checkpoints = (run / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    if checkpoint := next(filter(Path.is_file, checkpoints), None):
        commands.append(("The test alone", f"cifar-lit test --ckpt_path {shlex.quote(display_path(checkpoint))}"))
    again = f"cifar-lit report {shlex.quote(display_path(run))}"
    commands.append(("The page anew, with suspected labels and duplicates", again))
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    images = data.test_images.images
    return Content(run.absolute().name, data.classes, predictions, images, metrics, text, read_curves(run), commands)


def inspected_content(run: Path, data: ImageData, look: Look, device: str) -> Content:
    """All that a page tells, from the run's own figures where these test images are those that it was tested on.

    look: the run's net. device: where to compare the images' embeddings.
    """
    metrics, train, test = read_metrics(run), data.train_images, data.test_images
    recorded = (metrics.get("test") or {}).get("fingerprint")
    same = recorded == fingerprint(test.images, test.labels)
    predictions = read_predictions(run / "predictions.csv", data.classes) if same else None
    if recorded and not same:
        print("these are other test images than the run was tested on: they are scored anew", file=sys.stderr, flush=True)
        metrics = {**metrics, "test": None}
    logits, embeddings = _looked_at(look, test, "test images")
    if predictions is None:
        scored = {"indices": torch.arange(len(test)), "labels": test.labels, "probabilities": logits.double().softmax(1)}
        predictions = prediction_table(scored)
    logits, known = _looked_at(look, train, "training images")
    with progress("comparing test with training images", len(test)) as advance:
        cosines, rows = nearest_embeddings(known.to(device), embeddings.to(device), advance)
    held_out = set(data.split[1].tolist())
    findings = inspect_labels(train, test, held_out, logits.softmax(1), (cosines.cpu(), rows.cpu()))
    return replace(run_content(run, metrics, data, predictions), findings=findings)


def _looked_at(look: Look, images: ImageSet, what: str) -> tuple[Tensor, Tensor]:
    """float32 logits (N, classes) and embeddings (N, features) of a set, on the CPU."""
    parts = []
    with progress(f"looking at the {what}", len(images)) as advance:
        for part in images.images.split(IMAGES_AT_ONCE):
            parts.append(look(part.permute(0, 3, 1, 2)))
            advance(len(part))
    logits, embeddings = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(embeddings)


# ---- From the content to HTML.


def render(content: Content) -> str:
    """The page as HTML. Every name in it is escaped: of classes, and of whatever else comes from outside."""
    predictions, classes = content.predictions, content.classes
    matrix = predictions.confusion(len(classes))
    bins = reliability(predictions.probability, predictions.hits)
    error = expected_calibration_error(bins)
    page = Environment(loader=PackageLoader("cifar_lit.runs", "pages"), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    right, matrix_uri = int(predictions.hits.sum()), None
    if len(classes) > MAX_TABLE_CLASSES:
        matrix_uri = data_uri(confusion_matrix(matrix, classes).permute(1, 2, 0), largest=4096)
    return page.get_template("report.html.j2").render(
        content=content,
        right=right,
        accuracy=right / len(predictions),
        summary=summary(content.metrics),
        charts=charts(content.curves),
        matrix=matrix.tolist(),
        matrix_uri=matrix_uri,
        predicted_counts=matrix.sum(0).tolist(),
        confused=most_confused(matrix, classes),
        bins=bins,
        error=error,
        mean=float(predictions.probability.mean()),
        diagram=reliability_diagram("reliability", bins, f"Reliability diagram: expected calibration error {error:.4f}"),
        mistakes=pictures(content, predictions.confident_mistakes(GALLERY_SIZE)),
        doubtful=pictures(content, predictions.doubtful_hits(GALLERY_SIZE)),
    )


def reliability(probability: Tensor, hits: Tensor, bins: int = 15) -> list[Bin]:
    """Images by the probability of the predicted class, in bins of equal width; 15 as in Guo et al. 2017.

    probability: float (N,) in 0 … 1. hits: bool (N,), whether the prediction is right.
    """
    places = (probability * bins).ceil().long().sub(1).clamp(0, bins - 1)
    counts = torch.bincount(places, minlength=bins)
    confidence, accuracy = (torch.bincount(places, each.double(), minlength=bins) / counts for each in (probability, hits))
    columns = zip(counts.tolist(), confidence.tolist(), accuracy.tolist(), strict=True)
    return [Bin(place / bins, (place + 1) / bins, *column) for place, column in enumerate(columns)]


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """The mean distance between probability and accuracy, in 0 … 1: Σ (images of a bin / all images) · |accuracy − confidence|.

    After C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, On Calibration of Modern Neural Networks, ICML 2017.
    """
    images = sum(part.images for part in bins)
    return sum(part.images / images * abs(part.accuracy - part.confidence) for part in bins if part.images)


def summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts of metrics.json by name, those that are there, with all figures of the test and the validation."""
    facts = []
    for name in ("recipe", "net", "parameters", "dataset", "epochs", "batch_size", "seed", "precision"):
        value = metrics.get(name)
        if value is not None:
            facts.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) and name != "seed" else str(value)))
    devices = metrics.get("devices", 1)
    forms = (("accelerator", "trained on", f"{devices} × {{}}"), ("train_seconds", "training took", "{:,.1f} s"),
             ("images_per_second", "images a second", "{:,.0f}"))  # fmt: skip
    facts += [(what, form.format(metrics[name])) for name, what, form in forms if metrics.get(name)]
    for part, what in (("test", "test"), ("val", "validation")):
        for name, value in (metrics.get(part) or {}).items():
            headline = name == "images" or (part, name) == ("test", "accuracy")
            if isinstance(value, int | float) and not headline:
                facts.append((f"{what} {name}", f"{value:.4f}"))
            elif name == "tta":
                facts.append((f"{what} accuracy with {value['views']} views", f"{value['accuracy']:.4f}"))
    return facts


def charts(curves: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Names and charts of all that a training logged more than once."""
    logged: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in FIRST_CHARTS}
    for row in curves:
        for column, value in row.items():
            part, _, metric = column.partition("/")
            if part not in PARTS:
                part = metric = column
            if column not in ("epoch", "step") and "step" in row:
                logged.setdefault(metric, {}).setdefault(part, []).append((row["step"], value))
    drawn: list[tuple[str, str]] = []
    for name, lines in logged.items():
        if any(len(points) > 1 for points in lines.values()):
            ordered = {part: lines[part] for part in (*PARTS, name) if part in lines}
            last = ", ".join(f"{part} ends at {points[-1][1]:.4g}" for part, points in ordered.items())
            title = TITLES.get(name, name)
            label = f"{title.capitalize()} over training steps: {last}"
            drawn.append((title, line_chart(f"chart-{len(drawn)}", ordered, label)))
    return drawn


def most_confused(matrix: Tensor, classes: Sequence[str], most: int = 10) -> list[tuple[str, str, int, float]]:
    """Label, predicted class, images and their fraction of the label's, for the pairs that are confused most often."""
    wrong = matrix.clone().fill_diagonal_(0)
    pairs = []
    for place in wrong.flatten().argsort(descending=True, stable=True)[:most].tolist():
        label, predicted = divmod(place, len(classes))
        if images := int(wrong[label, predicted]):
            pairs.append((classes[label], classes[predicted], images, images / int(matrix[label].sum())))
    return pairs


def captions(table: PredictionTable, places: Tensor, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """The lines below each image at these places of a table; the predicted class is told where it is not the label."""
    lines: list[tuple[str, ...]] = []
    columns = (table.indices, table.labels, table.predicted, table.probability)
    for index, label, predicted, probability in zip(*(column[places].tolist() for column in columns), strict=True):
        names = (classes[label],) if predicted == label else (f"true {classes[label]}", f"said {classes[predicted]}")
        lines.append((*names, f"{probability:.4f} · no. {index}"))
    return lines


def pictures(content: Content, places: Tensor) -> list[Picture]:
    """The test images at these places of the predictions."""
    images = content.images[content.predictions.indices[places]]
    lines = captions(content.predictions, places, content.classes)
    return [Picture(data_uri(image), f"Test image: {', '.join(line)}", line) for image, line in zip(images, lines, strict=True)]
