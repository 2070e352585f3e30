"""`report.html`: a self-contained page about a run that works offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor
from torchmetrics.functional.classification import binary_precision_recall_curve

from cifar_lit.base.files import display_path
from cifar_lit.base.stats import SIGNIFICANT, binomial_tail, holm, wilson_interval
from cifar_lit.base.text import listed, note, printable_lines, quoted
from cifar_lit.data.image_set import ImageSet
from cifar_lit.inference.calibration import expected_calibration_error, reliability, tempered
from cifar_lit.inference.logits import set_logits
from cifar_lit.run.label_results import label_results
from cifar_lit.run.predictions import PredictionTable, prediction_table, read_probabilities
from cifar_lit.run.record import (
    Metrics,
    changes_text,
    group_lines,
    read_metrics,
    score_title,
    scores_of,
    shown_scores,
    weights_text,
)
from cifar_lit.run.results import fingerprint
from cifar_lit.runs.figures import (
    GALLERY_SIZE,
    PART_NAMES,
    Picture,
    as_svg,
    curve_figure,
    curves,
    data_uri,
    precision_recall_figure,
)
from cifar_lit.runs.label_errors import (
    Duplicates,
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

# Facts of metrics.json: label and format.
FACTS = {
    "recipe": ("recipe", "{}"), "net": ("net", "{}"), "parameters": ("parameters", "{:,}"),
    "dataset": ("dataset", "{}"), "epochs": ("epochs", "{:,}"), "batch_size": ("batch size", "{:,}"),
    "seed": ("seed", "{}"), "precision": ("precision", "{}"), "accelerator": ("devices", "{}"),
    "processor": ("processor", "{}"), "train_seconds": ("training time", "{:,.1f} s"),
    "images_per_second": ("training speed", "{:,.0f} images/s"), "date": ("finished", "{}"),
    "commit": ("commit of cifar-lit", "{}"),
}  # fmt: skip
PAIRS = 20  # rows of a table of two classes or labels
WORST = 3  # labels whose precision is drawn over recall


def inspected_page(run: Path, data: ImageData, net: LoadedNet) -> str:
    """Return the page with suspected label errors and duplicates, from a pass over all images.

    If the run was tested on the same test images, its predictions are used. Otherwise they are computed again.
    """
    metrics = read_metrics(run)
    test = data.test_images
    probabilities = None
    tested_on = scores_of(metrics).get("fingerprint")
    if tested_on == fingerprint(test.images, test.labels):
        probabilities = read_probabilities(run, (len(test), len(data.classes)))
    elif tested_on:
        note("the run was tested on other images: evaluating these test images now")
        metrics["test"] = None
    if probabilities is None:
        logits = set_logits(net, test, torch.arange(len(test)), "predicting the test images")
        probabilities = net.card.task.probabilities(logits)
    probabilities = tempered(probabilities.double(), net.card.temperature)
    if net.card.thresholds is not None and not metrics.get("test"):
        metrics["test"] = label_results(probabilities, test.labels, net.card.thresholds, data.classes)
    values = {"indices": torch.arange(len(test)), "labels": test.labels, "probabilities": probabilities}
    return page_of(run, metrics, data, values, find_duplicates(_used(data), test))


def page_of(
    run: Path, metrics: Metrics, data: ImageData, predictions: Mapping[str, Tensor], duplicates: Duplicates | None
) -> str:
    """Return the page with suspected label errors. The training has written those of its own images.

    Args:
        metrics: contents of metrics.json.
        predictions: `indices`, `labels` and `probabilities` for the test images, with the temperature of the net.
        duplicates: None if they were not searched.
    """
    train, test = data.train_images, data.test_images
    ranking = rank_labels(predictions["labels"], predictions["probabilities"])
    tested = listed_images(test, predictions["indices"], ranking, ["test"] * len(test))
    findings = Findings(None, suspect_labels(test, tested, "Test"), duplicates)
    suspected = read_list(run, train)
    if suspected is not None:
        findings = findings._replace(train=suspect_labels(train, suspected, "Training"))
    table = predictions if test.has_several_labels else prediction_table(predictions)
    return render(run, metrics, data, table, findings)


def _used(data: ImageData) -> ImageSet:
    """Return the training and validation images; in a cross-validation, `data.train_images` has test images too."""
    images = data.train_images
    if not data.parts.folds:
        return images
    keep = torch.ones(len(images), dtype=torch.bool)
    keep[data.parts.fold_rows] = False
    return images.subset(keep.nonzero()[:, 0])


def render(
    run: Path,
    metrics: Metrics,
    data: ImageData,
    predictions: PredictionTable | Mapping[str, Tensor],
    findings: Findings,
) -> str:
    """Return the page as HTML with all text escaped.

    Args:
        metrics: contents of metrics.json.
        predictions: those for the test images, with the temperature of the net. With several labels an image,
            `ImageClassifier.predictions`.
    """
    test = scores_of(metrics)
    if isinstance(predictions, PredictionTable):
        images, parts = len(predictions.labels), _class_parts(data, predictions)
    else:
        images, parts = len(predictions["labels"]), _label_parts(test, data, predictions)
    charts = []
    for name, lines in curves(run).items():
        ends = [f"{PART_NAMES[part]} ends at {points[-1][1]:.4g}" for part, points in lines.items()]
        charts.append(as_svg(curve_figure({name: lines}), name, f"{name} over epochs: {', '.join(ends)}"))
    page = Environment(loader=PackageLoader("cifar_lit.runs", "pages"), autoescape=True, undefined=StrictUndefined,
                       finalize=printable_lines, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return page.get_template("report.html.j2").render(
        title=run.absolute().name,
        folder=quoted(display_path(run)),
        metrics=metrics,
        test=test,
        images=images,
        summary=summary(metrics),
        charts=charts,
        names=data.classes,
        group_lines=group_lines(test),
        findings=findings,
        missing_list=missing_list(run),
        **parts,
    )


def _class_parts(data: ImageData, table: PredictionTable) -> dict[str, Any]:
    """Return the parts of the page about the classes of images with one label each."""
    classes = data.classes
    matrix = table.confusion(len(classes))
    bins = reliability(table.probability, table.hits)
    correct, images = int(table.hits.sum()), len(table.labels)
    rows = _class_rows(matrix, classes, data.class_counts.tolist())
    return {
        "correct": correct,
        "interval": wilson_interval(correct, images),
        "class_rows": rows,
        "worse": _worse_classes(rows, correct / images),
        "matrix": matrix.tolist(),
        "largest": int(matrix.clone().fill_diagonal_(0).max()),
        "confused": _most_frequent(matrix, matrix.sum(1), classes),
        "error": expected_calibration_error(bins),
        "bins": [part for part in reversed(bins) if part.images],
        "mean": float(table.probability.mean()),
        "mistakes": _mistakes(data, table),
    }


def _label_parts(test: Metrics, data: ImageData, predictions: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the parts of the page about several labels: their numbers, the worst first, and which are confused."""
    rows = []
    for (name, numbers), trained in zip(test["labels"].items(), data.class_counts.tolist(), strict=True):
        rows.append({**numbers, "name": name, "trained": trained})
    labels, probabilities = predictions["labels"], predictions["probabilities"]
    thresholds = torch.tensor([row["threshold"] for row in rows])
    given = (probabilities >= thresholds).float()
    has = (labels == 1).float()
    missed, surplus = has * (1 - given), (labels == 0) * given
    rows.sort(key=lambda row: (row["images"] == 0, row["average_precision"]))
    lines = {}
    tested = [row for row in rows if row["images"]]
    for row in tested[:WORST]:
        column = data.classes.index(row["name"])
        own = probabilities[:, column], labels[:, column].long()
        lines[row["name"]] = binary_precision_recall_curve(*own, ignore_index=-1)[:2]
    chart = ""
    if lines:
        chart = as_svg(precision_recall_figure(lines), "precision", f"precision over recall of {listed(lines)}")
    return {
        "label_rows": rows,
        "chart": chart,
        "confused": _most_frequent(missed.T @ surplus, has.sum(0), data.classes),
        "together": _most_frequent(has.T @ has, has.sum(0), data.classes),
    }


def summary(metrics: Metrics) -> list[tuple[str, str]]:
    """Return (label, text) of the facts in metrics.json, and of the scores on the test and validation images."""
    facts = []
    classes = len(scores_of(metrics).get("per_class", ()))
    for name, (label, form) in FACTS.items():
        value = metrics.get(name)
        if name == "accelerator":
            value = f"{metrics.get('devices', 1)} × {value}"
        if value is not None:
            facts.append((label, form.format(value)))
    if tested := weights_text(metrics):
        facts.append(("weights", tested))
    if changes := changes_text(metrics):
        facts.append(("changed when resumed", changes))
    for part in ("test", "val"):
        scores = scores_of(metrics, part)
        for name, value in shown_scores(scores, classes).items():
            if (part, name) == ("test", "accuracy"):  # in the headline
                continue
            text = f"{value:.4f}"
            if name == "accuracy" or name in METRICS:
                text = f"{100 * value:.2f} %"
            facts.append((f"{PART_NAMES[part]} {score_title(name)}", text))
        if tta := scores.get("tta"):
            facts.append((f"{PART_NAMES[part]} accuracy with {tta['views']} views", f"{100 * tta['accuracy']:.2f} %"))
    return facts


def _most_frequent(matrix: Tensor, totals: Tensor, classes: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """Return the largest cells beside the diagonal: label, other class, images, and their fraction of the label's.

    matrix: number of images, (classes, classes). totals: number of images with each label, (classes,).
    """
    counts = matrix.clone().fill_diagonal_(0).flatten()
    frequent = []
    for cell in counts.argsort(descending=True, stable=True)[:PAIRS].tolist():
        row, column = divmod(cell, len(classes))
        if images := int(counts[cell]):
            frequent.append((classes[row], classes[column], images, images / int(totals[row])))
    return frequent


def _class_rows(matrix: Tensor, classes: Sequence[str], trained: Sequence[int]) -> list[dict[str, Any]]:
    """Return the numbers of images of each class, the least accurate first. trained: training images."""
    rows = []
    counts = matrix.sum(1).tolist(), matrix.sum(0).tolist(), matrix.diag().tolist()
    for name, images, tested, predicted, correct in zip(classes, trained, *counts, strict=True):
        row = {"name": name, "trained": images, "tested": tested, "predicted": predicted, "correct": correct}
        row["interval"] = wilson_interval(correct, tested) if tested else (0.0, 1.0)
        row["accuracy"] = correct / tested if tested else 1.0
        rows.append(row)
    return sorted(rows, key=lambda row: row["accuracy"])


def _worse_classes(rows: Sequence[dict[str, Any]], accuracy: float) -> str:
    """Return the classes that are less accurate than all images with p < 0.05, by Holm's test; empty for none."""
    tails = [binomial_tail(row["correct"], row["tested"], accuracy) for row in rows]
    return listed(row["name"] for row, p in zip(rows, holm(tails), strict=True) if p < SIGNIFICANT)


def _mistakes(data: ImageData, table: PredictionTable) -> list[Picture]:
    """Return the most confident mistakes."""
    pictures = []
    rows = table.confident_mistakes(GALLERY_SIZE)
    for index, label, predicted, probability in zip(*(column[rows].tolist() for column in table), strict=True):
        name = data.test_images.name(index)
        predicted_as = f"predicted {data.classes[predicted]} {100 * probability:.1f} %"
        lines = (f"true {data.classes[label]}", predicted_as, name)
        pictures.append(Picture(data_uri(data.test_images.images[index]), f"Test image: {', '.join(lines)}", lines))
    return pictures
