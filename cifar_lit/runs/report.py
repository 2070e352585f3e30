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

from cifar_lit.data.download import progress
from cifar_lit.data.image_set import ImageSet
from cifar_lit.runs.charts import (
    BINS,
    GALLERY_SIZE,
    Picture,
    data_uri,
    expected_calibration_error,
    line_chart,
    matrix_uri,
    reliability,
    reliability_diagram,
)
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

    title: the run's name. classes: their names. predictions: of the test. images: the test set, uint8 (N, H, W, C). metrics: of
    metrics.json, as far as there are any. config: the text of config.yaml. curves: rows of metrics.csv. commands: what
    they do, and what to type. findings: None where the training images were not looked at.
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
    config, folder = run / "config.yaml", shlex.quote(display_path(run))
    checkpoints = [path for name in ("best", "last") if (path := run / "checkpoints" / f"{name}.ckpt").is_file()]
    commands = []
    if config.is_file():
        commands.append(("The training and its test", f"cifar-lit train --config {shlex.quote(display_path(config))}"))
    if checkpoints:
        commands.append(("The test alone", f"cifar-lit test --ckpt_path {shlex.quote(display_path(checkpoints[0]))}"))
    commands.append(("The page anew, with suspected labels and duplicates", f"cifar-lit report {folder}"))
    return Content(
        title=run.absolute().name,
        classes=data.classes,
        predictions=predictions,
        images=data.test_images.images,
        metrics=metrics,
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        curves=read_curves(run),
        commands=commands,
    )


def inspected_content(run: Path, data: ImageData, look: Look, device: str) -> Content:
    """All that a page tells, from the run's own figures where these test images are those that it was tested on.

    Args:
        look: The run's net.
        device: Where to compare the images' embeddings.
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
    return page.get_template("report.html.j2").render(
        content=content,
        metrics=content.metrics,
        accuracy=float(predictions.hits.double().mean()),
        images=len(predictions),
        wrong=int((~predictions.hits).sum()),
        summary=summary(content.metrics),
        charts=charts(content.curves),
        rows=class_rows(matrix, classes),
        matrix=matrix.tolist() if len(classes) <= MAX_TABLE_CLASSES else None,
        matrix_uri=None if len(classes) <= MAX_TABLE_CLASSES else matrix_uri(matrix),
        confused=most_confused(matrix, classes),
        bins=[part for part in bins if part.images],
        bin_count=BINS,
        error=error,
        mean=float(predictions.probability.mean()),
        diagram=reliability_diagram("reliability", bins, f"Reliability diagram: expected calibration error {error:.4f}"),
        mistakes=pictures(content, predictions.confident_mistakes(GALLERY_SIZE)),
        doubtful=pictures(content, predictions.doubtful_hits(GALLERY_SIZE)),
        findings=content.findings,
    )


def summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts of metrics.json by name, those that are there, with all figures of the test and the validation."""
    facts = []
    for name in ("recipe", "net", "parameters", "dataset", "epochs", "batch_size", "seed", "precision"):
        value = metrics.get(name)
        if value is not None:
            facts.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) and name != "seed" else str(value)))
    if metrics.get("accelerator"):
        facts.append(("trained on", f"{metrics.get('devices', 1)} × {metrics['accelerator']}"))
    if metrics.get("train_seconds"):
        facts.append(("training took", f"{metrics['train_seconds']:,.1f} s"))
    if metrics.get("images_per_second"):
        facts.append(("images a second", f"{metrics['images_per_second']:,.0f}"))
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
            ordered = {part: lines[part] for part in sorted(lines, key=lambda part: PARTS.index(part) if part in PARTS else -1)}
            last = ", ".join(f"{part} ends at {points[-1][1]:.4g}" for part, points in ordered.items())
            title = TITLES.get(name, name)
            chart = line_chart(f"chart-{len(drawn)}", ordered, f"{title.capitalize()} over training steps: {last}")
            drawn.append((title, chart))
    return drawn


def class_rows(matrix: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """For each class its images, how often it was predicted and hit, and precision, recall and F1; None where undefined."""
    rows = []
    for name, *counts in zip(classes, matrix.diag().tolist(), matrix.sum(1).tolist(), matrix.sum(0).tolist(), strict=True):
        hits, images, predicted = counts
        rows.append(
            {
                "name": name,
                "images": images,
                "predicted": predicted,
                "hits": hits,
                "precision": hits / predicted if predicted else None,
                "recall": hits / images if images else None,
                "f1": 2 * hits / (images + predicted) if images + predicted else None,
            }
        )
    return rows


def most_confused(matrix: Tensor, classes: Sequence[str], most: int = 10) -> list[tuple[str, str, int, float]]:
    """Label, predicted class, images and their fraction of the label's, for the pairs that are confused most often."""
    wrong = matrix.clone().fill_diagonal_(0)
    pairs = []
    for place in wrong.flatten().argsort(descending=True, stable=True)[:most].tolist():
        label, predicted = divmod(place, len(classes))
        if images := int(wrong[label, predicted]):
            pairs.append((classes[label], classes[predicted], images, images / int(matrix[label].sum())))
    return pairs


def pictures(content: Content, places: Tensor) -> list[Picture]:
    """The test images at these places of the predictions; the predicted class is told where it is not the label."""
    table, gallery = content.predictions, []
    for place in places.tolist():
        label, predicted = (content.classes[int(numbers[place])] for numbers in (table.labels, table.predicted))
        index, probability = int(table.indices[place]), float(table.probability[place])
        alt = f"Test image {index}: {label}, predicted {predicted} with probability {probability:.2f}"
        names = (label,) if predicted == label else (f"true {label}", f"said {predicted}")
        gallery.append(Picture(data_uri(content.images[index]), alt, (*names, f"{probability:.4f} · no. {index}")))
    return gallery
