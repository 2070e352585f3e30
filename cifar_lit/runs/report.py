"""`report.html`: one file about a run, with its pictures inside, that asks for nothing from anywhere."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from cifar_lit.runs.charts import (
    BINS,
    data_uri,
    expected_calibration_error,
    line_chart,
    matrix_uri,
    reliability,
    reliability_diagram,
)
from cifar_lit.runs.predictions import PredictionTable

SHOWN = 24  # images in a gallery
TABLED = 20  # classes up to which the confusion matrix is a table; beyond, a picture
CURVES = {
    "loss": ("train/loss", "val/loss", "test/loss"),
    "accuracy": ("train/accuracy", "val/accuracy", "test/accuracy"),
    "learning rate": ("lr",),
    "weight norm": ("weight_norm",),
}


class Picture(NamedTuple):
    """One image of a gallery: its address, what it shows in words, and the lines below it."""

    uri: str
    alt: str
    lines: Sequence[str]


class Pair(NamedTuple):
    """A test image beside the training image that is like it."""

    test: Picture
    train: Picture
    lines: Sequence[str]


@dataclass(frozen=True)
class Findings:
    """What a look at the training images found.

    train_images, test_images: how many were looked at. suspects: the training images whose label the net is most against, of
    `rejected` in all; confident: how many of these confident learning counts. pairs: the test
    images most like a training image. twins: test images that are a training image, pixel by pixel; contrary: those of
    them with another label there.
    """

    train_images: int
    test_images: int
    suspects: Sequence[Picture]
    rejected: int
    confident: int
    pairs: Sequence[Pair]
    twins: int
    contrary: int


@dataclass(frozen=True)
class Content:
    """What a page is about.

    title: the run's name. classes: their names. outcomes: of the test. images: the test set, uint8 (N, H, W, C). metrics: of
    metrics.json, as far as there are any. config: the text of config.yaml. curves: rows of metrics.csv. commands: what
    they do, and what to type. findings: None where the training images were not looked at.
    """

    title: str
    classes: Sequence[str]
    outcomes: PredictionTable
    images: Tensor
    metrics: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    curves: Sequence[Mapping[str, float]] = ()
    commands: Sequence[tuple[str, str]] = ()
    findings: Findings | None = None


def report(content: Content) -> str:
    """The page as HTML. Every name in it is escaped: of classes, and of whatever else comes from outside."""
    outcomes, classes = content.outcomes, content.classes
    matrix = outcomes.confusion(len(classes))
    bins = reliability(outcomes.probability, outcomes.hits)
    error = expected_calibration_error(bins)
    mean = float(outcomes.probability.mean())
    accuracy = float(outcomes.hits.double().mean())
    page = Environment(loader=PackageLoader("cifar_lit.runs", "pages"), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return page.get_template("report.html.j2").render(
        content=content,
        metrics=content.metrics,
        accuracy=accuracy,
        images=len(outcomes),
        wrong=int((~outcomes.hits).sum()),
        summary=summary(content.metrics),
        charts=charts(content.curves),
        rows=class_rows(matrix, classes),
        matrix=matrix.tolist() if len(classes) <= TABLED else None,
        matrix_uri=None if len(classes) <= TABLED else matrix_uri(matrix),
        confused=most_confused(matrix, classes),
        bins=[found for found in bins if found.images],
        bin_count=BINS,
        error=error,
        mean=mean,
        diagram=reliability_diagram("reliability", bins, f"Reliability diagram: expected calibration error {error:.4f}"),
        mistakes=pictures(content, outcomes.confident_mistakes(SHOWN)),
        doubtful=pictures(content, outcomes.doubtful_hits(SHOWN)),
        findings=content.findings,
    )


def summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts of metrics.json by name, those that are there."""
    found = []
    for name in ("recipe", "net", "parameters", "dataset", "epochs", "batch_size", "seed", "precision"):
        value = metrics.get(name)
        if value is not None:
            found.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) and name != "seed" else str(value)))
    if metrics.get("accelerator"):
        found.append(("trained on", f"{metrics.get('devices', 1)} × {metrics['accelerator']}"))
    if metrics.get("train_seconds"):
        found.append(("training took", f"{metrics['train_seconds']:,.1f} s"))
    if metrics.get("images_per_second"):
        found.append(("images a second", f"{metrics['images_per_second']:,.0f}"))
    test, val = metrics.get("test") or {}, metrics.get("val") or {}
    if test.get("loss") is not None:
        found.append(("test loss", f"{test['loss']:.4f}"))
    if views := test.get("tta"):
        found.append((f"test accuracy with {views['views']} views", f"{views['accuracy']:.4f}"))
    if val.get("accuracy") is not None:
        found.append(("validation accuracy", f"{val['accuracy']:.4f}"))
    return found


def charts(curves: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Names and charts of what a training logged."""
    drawn = []
    for title, names in CURVES.items():
        lines = {name.partition("/")[0]: [(row["step"], row[name]) for row in curves if name in row] for name in names}
        lines = {name: points for name, points in lines.items() if points}
        if any(len(points) > 1 for points in lines.values()):
            last = ", ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in lines.items())
            drawn.append((title, line_chart(title.replace(" ", "-"), lines, f"{title.capitalize()} over training steps: {last}")))
    return drawn


def class_rows(matrix: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """For each class its images, how often it was predicted and hit, and precision, recall and F1; None where undefined."""
    rows = []
    for number, name in enumerate(classes):
        hits, images, predicted = (int(x) for x in (matrix[number, number], matrix[number].sum(), matrix[:, number].sum()))
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
    places = wrong.flatten().argsort(descending=True, stable=True)[:most].tolist()
    pairs = [divmod(place, len(classes)) for place in places]
    return [
        (
            classes[label],
            classes[predicted],
            int(wrong[label, predicted]),
            int(wrong[label, predicted]) / int(matrix[label].sum()),
        )
        for label, predicted in pairs
        if wrong[label, predicted]
    ]


def pictures(content: Content, places: Tensor) -> list[Picture]:
    """The test images at these places of the outcomes; the predicted class is told where it is not the label."""
    outcomes, found = content.outcomes, []
    for place in places.tolist():
        label, said = content.classes[int(outcomes.labels[place])], content.classes[int(outcomes.predicted[place])]
        index, probability = int(outcomes.indices[place]), float(outcomes.probability[place])
        alt = f"Test image {index}: {label}, predicted {said} with probability {probability:.2f}"
        names = (label,) if said == label else (f"true {label}", f"said {said}")
        found.append(Picture(data_uri(content.images[index]), alt, (*names, f"{probability:.4f} · no. {index}")))
    return found


def about(*args):
    from cifar_lit.cli.report import about

    return about(*args)


def read_curves(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv as numbers, what was not taken left out; none where there is no such file."""
    try:
        with path.open(newline="") as file:
            return [{name: float(value) for name, value in row.items() if name and value} for row in csv.DictReader(file)]
    except (OSError, ValueError):
        return []
