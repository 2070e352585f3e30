"""`report.html`: a self-contained page about a run that works offline."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from cifar_lit.base.files import display_path
from cifar_lit.base.stats import wilson_interval
from cifar_lit.base.text import note, printable_lines
from cifar_lit.data.image_set import ImageSet
from cifar_lit.inference.calibration import expected_calibration_error, reliability
from cifar_lit.inference.logits import set_logits
from cifar_lit.run.predictions import PredictionTable, prediction_table, read_predictions
from cifar_lit.run.record import Metrics, changes_text, group_lines, read_curves, read_metrics, scores_of
from cifar_lit.run.results import fingerprint
from cifar_lit.runs.figures import (
    GALLERY_SIZE,
    PART_NAMES,
    Picture,
    as_svg,
    confusion_matrix,
    data_uri,
    line_chart,
    reliability_diagram,
)
from cifar_lit.runs.label_errors import (
    Findings,
    find_duplicates,
    listed_images,
    missing_list,
    rank_labels,
    read_list,
    suspect_labels,
)
from cifar_lit.training.score import METRICS

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData
    from cifar_lit.inference.model_file import LoadedNet

PARTS = ("train", "val", "test")  # `train/loss`, `val/loss` and `test/loss` share a chart
FIRST_CHARTS = ("loss", "accuracy", "lr", "weight_norm")  # others follow in the order of their columns
# Facts of metrics.json: label and format.
FACTS = {
    "recipe": ("recipe", "{}"), "net": ("net", "{}"), "parameters": ("parameters", "{:,}"),
    "dataset": ("dataset", "{}"), "epochs": ("epochs", "{:,}"), "batch_size": ("batch size", "{:,}"),
    "seed": ("seed", "{}"), "precision": ("precision", "{}"), "accelerator": ("devices", "{}"),
    "train_seconds": ("training time", "{:,.1f} s"), "images_per_second": ("training speed", "{:,.0f} images/s"),
}  # fmt: skip


def inspected_page(run: Path, data: ImageData, net: LoadedNet) -> str:
    """Return the page with suspected label errors and duplicates, from a pass over the test images.

    If the run was tested on the same test images, its predictions are used. Otherwise they are computed again. The
    training has written the suspected labels of its own images.
    """
    metrics = read_metrics(run)
    train, test = data.train_images, data.test_images
    test_logits = set_logits(net, test, torch.arange(len(test)), "predicting the test images")
    predictions = None
    tested_on = scores_of(metrics).get("fingerprint")
    if tested_on == fingerprint(test.images, test.labels):
        predictions = read_predictions(run / "predictions.csv", data.classes)
    elif tested_on:
        note("the run was tested on other images: evaluating these test images now")
        metrics["test"] = None
    if predictions is None:
        values = {"indices": torch.arange(len(test)), "labels": test.labels}
        predictions = prediction_table({**values, "probabilities": test_logits.double().softmax(1)})
    listed = read_list(run, train)
    ranking = rank_labels(test.labels, test_logits.softmax(1))
    tested = listed_images(test, torch.arange(len(test)), ranking, ["test"] * len(test))
    findings = Findings(
        None if listed is None else suspect_labels(train, listed, "Training"),
        suspect_labels(test, tested, "Test"),
        *find_duplicates(_without_test(data), test),
    )
    return render(run, metrics, data, predictions, findings)


def _without_test(data: ImageData) -> ImageSet:
    """Return the training and validation images that are no test images.

    `data.train_images` has test images in a cross-validation, and if the folder val/ is also the test set.
    """
    images = data.train_images
    keep = torch.ones(len(images), dtype=torch.bool)
    if data.parts.folds:
        keep[data.parts.fold_rows] = False
    elif images.names:
        test_names = set(data.test_images.names)
        keep = torch.tensor([name not in test_names for name in images.names])
    if keep.all():
        return images
    rows = keep.nonzero()[:, 0]
    names = [images.name(row) for row in rows.tolist()]
    return ImageSet(images.images[rows], images.labels[rows], images.classes, names=names)


def render(
    run: Path,
    metrics: Metrics,
    data: ImageData,
    predictions: PredictionTable,
    findings: Findings | None = None,
) -> str:
    """Return the page as HTML with all text escaped.

    metrics: contents of metrics.json. predictions: those for the test images.
    findings: suspected label errors and duplicates; None if they were not searched.
    """
    classes = data.classes
    matrix = predictions.confusion(len(classes))
    bins = reliability(predictions.probability, predictions.hits)
    error = expected_calibration_error(bins)
    correct, images = int(predictions.hits.sum()), len(predictions.labels)
    test = scores_of(metrics)
    charts = []
    for number, (name, lines) in enumerate(_curves(run).items()):
        ends = [f"{PART_NAMES.get(part, part)} ends at {points[-1][1]:.4g}" for part, points in lines.items()]
        label = f"{_title(name)} over training steps: {', '.join(ends)}"
        charts.append((_title(name), as_svg(line_chart(lines), f"chart-{number}", label)))
    page = Environment(loader=PackageLoader("cifar_lit.runs", "pages"), autoescape=True, undefined=StrictUndefined,
                       finalize=printable_lines, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    folder = shlex.quote(display_path(run))
    return page.get_template("report.html.j2").render(
        title=run.absolute().name,
        folder=folder,
        images=images,
        correct=correct,
        interval=wilson_interval(correct, images),
        summary=summary(metrics),
        charts=charts,
        classes=_class_rows(matrix, classes, data.class_counts.tolist()),
        matrix=as_svg(confusion_matrix(matrix, classes), "matrix", f"Confusion matrix of {len(classes)} classes"),
        confused=_most_confused(matrix, classes),
        error=error,
        calibration=test.get("calibration", {"temperature": None, "tempered_error": None}),
        group_lines=group_lines(test),
        groups=test.get("groups", {}),
        coverage=test.get("coverage", []),
        mean=float(predictions.probability.mean()),
        diagram=as_svg(reliability_diagram(bins), "reliability", f"Reliability diagram: calibration error {error:.4f}"),
        mistakes=_mistakes(data, predictions),
        findings=findings,
        missing_list=missing_list(run),
    )


def _title(name: str) -> str:
    if name in METRICS:
        return METRICS[name].text
    return "learning rate" if name == "lr" else name.replace("_", " ")


def summary(metrics: Metrics) -> list[tuple[str, str]]:
    """Return (label, text) of the facts in metrics.json, and of the scores on the test and validation images."""
    facts = []
    for name, (label, form) in FACTS.items():
        value = metrics.get(name)
        if name == "accelerator":
            value = f"{metrics.get('devices', 1)} × {value}"
        if value is not None:
            facts.append((label, form.format(value)))
    if changes := changes_text(metrics):
        facts.append(("changed when resumed", changes))
    for part in ("test", "val"):
        scores = scores_of(metrics, part)
        for name, value in scores.items():
            in_headline = name == "images" or (part, name) == ("test", "accuracy")
            if isinstance(value, int | float) and not in_headline:
                facts.append((f"{PART_NAMES[part]} {_title(name)}", f"{value:.4f}"))
        if tta := scores.get("tta"):
            facts.append((f"{PART_NAMES[part]} accuracy with {tta['views']} views", f"{tta['accuracy']:.4f}"))
    return facts


def _curves(run: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return (step, value) by metric and part, of the values in metrics.csv that were logged more than once."""
    logged: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in FIRST_CHARTS}
    for row in read_curves(run):
        for column, value in row.items():
            part, _, metric = column.partition("/")
            if part not in PARTS:
                part = metric = column
            if column not in ("epoch", "step"):
                logged.setdefault(metric, {}).setdefault(part, []).append((row["step"], value))
    return {name: lines for name, lines in logged.items() if max(map(len, lines.values()), default=0) > 1}


def _most_confused(matrix: Tensor, classes: Sequence[str], limit: int = 10) -> list[tuple[str, str, int, float]]:
    """Return the most frequent confusions: label, predicted class, images, and their fraction of the label's images."""
    counts = matrix.clone().fill_diagonal_(0).flatten()
    totals = matrix.sum(1).tolist()
    confused = []
    for cell in counts.argsort(descending=True, stable=True)[:limit].tolist():
        row, column = divmod(cell, len(classes))
        if images := int(counts[cell]):
            confused.append((classes[row], classes[column], images, images / totals[row]))
    return confused


def _class_rows(matrix: Tensor, classes: Sequence[str], trained: Sequence[int]) -> list[dict[str, Any]]:
    """Return the numbers of images of each class, the least accurate first. trained: training images."""
    rows = []
    counts = matrix.sum(1).tolist(), matrix.sum(0).tolist(), matrix.diag().tolist()
    for name, images, tested, predicted, correct in zip(classes, trained, *counts, strict=True):
        row = {"name": name, "trained": images, "tested": tested, "predicted": predicted, "correct": correct}
        row["interval"] = wilson_interval(correct, tested) if tested else (0.0, 1.0)
        rows.append(row)
    return sorted(rows, key=lambda row: row["correct"] / max(1, row["tested"]))


def _mistakes(data: ImageData, table: PredictionTable) -> list[Picture]:
    """Return the most confident mistakes."""
    pictures = []
    rows = table.confident_mistakes(GALLERY_SIZE)
    for index, label, predicted, probability in zip(*(column[rows].tolist() for column in table), strict=True):
        name = data.test_images.name(index)
        lines = (f"true {data.classes[label]}", f"predicted {data.classes[predicted]}", f"{probability:.4f}", name)
        pictures.append(Picture(data_uri(data.test_images.images[index]), f"Test image: {', '.join(lines)}", lines))
    return pictures
