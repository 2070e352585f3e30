"""`report.html`: a self-contained page about a run that works offline."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.progress import progress
from cifar_lit.errors import UsageError
from cifar_lit.files import read_text
from cifar_lit.runs.card import MIN_HELD_OUT
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.figures import (
    GALLERY_SIZE,
    PART_NAMES,
    Picture,
    confusion_matrix,
    data_uri,
    expected_calibration_error,
    line_chart,
    reliability,
    reliability_diagram,
)
from cifar_lit.runs.groups import INVALID, group_lines, group_rows
from cifar_lit.runs.label_errors import (
    LIST,
    Findings,
    evidence,
    find_duplicates,
    find_nearest,
    rank_labels,
    suspect_labels,
    write_ranking,
)
from cifar_lit.runs.predictions import PredictionTable, fingerprint, prediction_table, read_predictions
from cifar_lit.runs.run_folder import changes_text, display_path, read_curves, read_metrics
from cifar_lit.stats import wilson_interval
from cifar_lit.text import note, printable_lines

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

MAX_TABLE_CLASSES = 20  # with more classes the confusion matrix is a picture instead of a table
MAX_CHARTS = 60  # the file of a stranger may have thousands of columns; a chart takes 50 ms
MAX_FACTS = 100
WIDE = 0.1  # half the width of an interval of a class's accuracy that needs more test images
PARTS = ("train", "val", "test")  # `train/loss`, `val/loss` and `test/loss` share a chart
FIRST_CHARTS = ("loss", "accuracy", "lr", "weight_norm")  # others follow in the order of their columns
TITLES = {"lr": "learning rate", "macro_f1": "macro F1", "top5": "top-5 accuracy"}
# Facts of metrics.json: label and format.
FACTS = {
    "recipe": ("recipe", "{}"), "net": ("net", "{}"), "parameters": ("parameters", "{:,}"),
    "dataset": ("dataset", "{}"), "epochs": ("epochs", "{:,}"), "batch_size": ("batch size", "{:,}"),
    "seed": ("seed", "{}"), "precision": ("precision", "{}"), "accelerator": ("devices", "{}"),
    "train_seconds": ("training time", "{:,.1f} s"), "images_per_second": ("training speed", "{:,.0f} images/s"),
}  # fmt: skip

# Computes logits and embeddings (N, …). Arguments: a function from rows to their images, the rows, a progress callback.
Embedder = Callable[[Callable[[Tensor], Tensor], Tensor, Callable[[int], None]], tuple[Tensor, Tensor]]


def inspected_page(run: Path, data: ImageData, embed: Embedder, device: str) -> str:
    """Return the page with suspected label errors and duplicates, from a pass over all images.

    If the run was tested on the same test images, its predictions are used. Otherwise they are computed again.

    embed: `inference.embeddings.logits_and_embeddings` with the run's net.
    device: device on which embeddings are compared.
    """
    metrics = read_metrics(run)
    train = data.train_images
    test = data.test_images
    predictions = None
    tested_on = (metrics.get("test") or {}).get("fingerprint")
    if tested_on == fingerprint(test.images, test.labels):
        predictions = read_predictions(run / "predictions.csv", data.classes, len(test))
    elif tested_on:
        note("the run was tested on other images: evaluating these test images now")
        metrics["test"] = None

    def embed_all(images: ImageSet, what: str) -> tuple[Tensor, Tensor]:
        with progress(f"computing embeddings of the {what}", len(images)) as advance:
            return embed(images.take, torch.arange(len(images)), advance)

    logits, embeddings = embed_all(test, "test images")
    if predictions is None:
        probabilities = logits.double().softmax(1)
        predictions = prediction_table(
            {"indices": torch.arange(len(test)), "labels": test.labels, "probabilities": probabilities}
        )
    train_logits, train_embeddings = embed_all(train, "training images")
    ranking = rank_labels(train.labels, *evidence(run, train_logits.softmax(1)))
    parts = data.parts.part_names()
    with suppress(OSError):  # a run that is read-only
        write_ranking(run / LIST, train, ranking, parts)
    others, rows = _without_test(data)
    with progress("comparing test with training images", len(test)) as advance:
        nearest = find_nearest(train_embeddings[rows].to(device), embeddings.to(device), advance)
    findings = Findings(
        suspect_labels(train, ranking, "Training", parts),
        suspect_labels(test, rank_labels(test.labels, logits.softmax(1)), "Test"),
        *find_duplicates(others, test, *nearest),
    )
    return render(run, metrics, data, predictions, findings)


def _without_test(data: ImageData) -> tuple[ImageSet, Tensor]:
    """Return the training and validation images that are no test images, and their rows in `data.train_images`.

    That contains test images in a cross-validation, and if the folder val/ is also the test set.
    """
    images = data.train_images
    keep = torch.ones(len(images), dtype=torch.bool)
    if data.parts.folds:
        keep[data.parts.fold_rows] = False
    elif images.names:
        test_names = set(data.test_images.names or ())
        keep = torch.tensor([name not in test_names for name in images.names])
    rows = keep.nonzero()[:, 0]
    if keep.all():
        return images, rows
    names = [images.name(row) for row in rows.tolist()]
    return ImageSet(images.images[rows], images.labels[rows], images.classes, names=names), rows


def render(
    run: Path,
    metrics: Mapping[str, Any],
    data: ImageData,
    predictions: PredictionTable,
    findings: Findings | None = None,
) -> str:
    """Return the page as HTML with all text escaped.

    metrics: contents of metrics.json. predictions: those for the test images.
    findings: suspected label errors and duplicates; None if they were not searched.
    """
    classes, test = data.classes, metrics.get("test") or {}
    matrix = predictions.confusion(len(classes))
    bins = reliability(predictions.probability, predictions.hits)
    error = expected_calibration_error(bins)
    matrix_uri = None
    if len(classes) > MAX_TABLE_CLASSES:
        matrix_uri = data_uri(confusion_matrix(matrix, classes).permute(1, 2, 0), largest=4096)
    config_text = ""
    with suppress(OSError, UnicodeDecodeError):
        config_text = read_text(run / "config.yaml")
    correct = int(predictions.hits.sum())
    needs = _class_needs(matrix, classes, data.class_counts.tolist())
    page = Environment(loader=PackageLoader("cifar_lit.runs", "pages"), autoescape=True, undefined=StrictUndefined,
                       finalize=printable_lines, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return page.get_template("report.html.j2").render(
        title=run.absolute().name,
        config=config_text,
        commands=_commands(run),
        search=f"cifar-lit report {_quoted(run)}",
        metrics=metrics,
        classes=classes,
        findings=findings,
        images=len(predictions.labels),
        correct=correct,
        interval=wilson_interval(correct, len(predictions.labels)),
        summary=summary(metrics),
        charts=_charts(read_curves(run)),
        smoothing=_label_smoothing(run / "config.yaml"),
        matrix=matrix.tolist(),
        matrix_uri=matrix_uri,
        predicted_counts=matrix.sum(0).tolist(),
        confused=_most_confused(matrix, classes),
        needs=needs,
        wide=WIDE,
        bins=bins,
        error=error,
        calibration=test.get("calibration"),
        fitted=len(data.split[1]) >= MIN_HELD_OUT,
        coverage=coverage_rows(test),
        groups=group_lines(test),
        group_tables=group_rows(test),
        mean=float(predictions.probability.mean()),
        diagram=reliability_diagram(
            "reliability", bins, f"Reliability diagram: expected calibration error {error:.4f}"
        ),
        mistakes=_pictures(data, predictions, predictions.confident_mistakes(GALLERY_SIZE)),
        doubtful=_pictures(data, predictions, predictions.doubtful_hits(GALLERY_SIZE)),
    )


def _commands(run: Path) -> list[tuple[str, str]]:
    """Return title and text of the commands that repeat the run."""
    commands = []
    if (run / "config.yaml").exists():
        commands.append(("Train and test again", f"cifar-lit train --config {_quoted(run / 'config.yaml')}"))
    for checkpoint in (run / "checkpoints/best.ckpt", run / "checkpoints/last.ckpt"):
        if checkpoint.exists():
            commands.append(("Test again", f"cifar-lit test --ckpt_path {_quoted(checkpoint)}"))
            break
    commands.append(("Search for label errors and duplicates", f"cifar-lit report {_quoted(run)}"))
    return commands


def _quoted(path: Path) -> str:
    return shlex.quote(display_path(path))


def _label_smoothing(config: Path) -> float:
    """Return the label smoothing in a config.yaml; 0 if the file is missing or cannot be read."""
    try:
        return float(plain_values(config)["model"]["label_smoothing"])
    except (UsageError, OSError, KeyError, TypeError, ValueError):
        return 0.0


def _title(name: str) -> str:
    return TITLES.get(name, name.replace("_", " "))


def summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (label, text) of the facts in metrics.json, and of the scores on the test and validation images."""
    facts = []
    for name, (label, form) in FACTS.items():
        value = metrics.get(name)
        if value is None or (name == "images_per_second" and value == 0):  # a last layer takes no steps
            continue
        if name == "accelerator":
            value = f"{metrics.get('devices', 1)} × {value}"
        facts.append((label, form.format(value)))
    if changes := changes_text(metrics):
        facts.append(("changed when resumed", changes))
    for part in ("test", "val"):
        for name, value in (metrics.get(part) or {}).items():
            in_headline = name == "images" or (part, name) == ("test", "accuracy")
            if isinstance(value, int | float) and not in_headline:
                facts.append((f"{PART_NAMES[part]} {_title(name)}", f"{value:.4f}"))
            elif name == "tta" and isinstance(value, dict):
                facts.append((f"{PART_NAMES[part]} accuracy with {value['views']} views", f"{value['accuracy']:.4f}"))
    return facts[:MAX_FACTS]


def _charts(curves: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return title and SVG of the first `MAX_CHARTS` values that were logged more than once."""
    logged: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in FIRST_CHARTS}
    for row in curves:
        for column, value in row.items():
            part, _, metric = column.partition("/")
            if part not in PARTS:
                part = metric = column
            if column not in ("epoch", "step") and "step" in row:
                logged.setdefault(metric, {}).setdefault(part, []).append((row["step"], value))
    charts: list[tuple[str, str]] = []
    for name, lines in logged.items():
        if len(charts) == MAX_CHARTS:
            break
        if max(map(len, lines.values()), default=0) < 2:
            continue
        ordered = {part: lines[part] for part in (*PARTS, name) if part in lines}
        ends = [f"{PART_NAMES.get(part, part)} ends at {points[-1][1]:.4g}" for part, points in ordered.items()]
        title = _title(name)
        label = f"{title.capitalize()} over training steps: {', '.join(ends)}"
        charts.append((title, line_chart(f"chart-{len(charts)}", ordered, label)))
    return charts


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


def _class_needs(matrix: Tensor, classes: Sequence[str], trained: Sequence[int]) -> list[dict[str, Any]]:
    """Return what each class needs, the least accurate first, at most `MAX_TABLE_CLASSES`. trained: training images."""
    mean = float(matrix.diag().sum() / matrix.sum())
    rows: list[dict[str, Any]] = []
    untested: list[dict[str, object]] = []
    for name, images, tested, correct in zip(
        classes, trained, matrix.sum(1).tolist(), matrix.diag().tolist(), strict=True
    ):
        row = {"name": name, "trained": images, "tested": tested, "accuracy": None, "low": 0.0, "high": 1.0}
        if not tested:
            untested.append({**row, "needs": "test images"})
            continue
        low, high = wilson_interval(correct, tested)
        needs = ""
        if high < mean:
            needs = "training images"
        elif high - low > 2 * WIDE:
            needs = "test images"
        rows.append({**row, "accuracy": correct / tested, "low": low, "high": high, "needs": needs})
    rows.sort(key=lambda row: float(row["accuracy"]))
    return [*rows, *untested][:MAX_TABLE_CLASSES]


def coverage_rows(test: Mapping[str, Any]) -> list[list[str]]:
    """Return a table of the coverage and the mean size of prediction sets, all images first, then the worst classes.

    test: the `test` part of metrics.json. Without coverage, or with invalid values, the table is empty.
    """
    with suppress(*INVALID):
        levels = test.get("coverage") or []
        header = ["", *(f"{100 * level['coverage']:g} %" for level in levels)]
        whole = ["all images", *(_covered(level["measured"], level["set_size"]) for level in levels)]
        rows = []
        for name in sorted(levels[-1]["per_class"], key=lambda name: float(levels[-1]["per_class"][name][0])):
            rows.append([name, *(_covered(*level["per_class"][name]) for level in levels)])
        return [header, whole, *rows[:MAX_TABLE_CLASSES]]
    return []


def _covered(share: float, size: float) -> str:
    return f"{100 * share:.1f} % · {size:.2f}"


def captions(
    table: PredictionTable, rows: Tensor, classes: Sequence[str], images: ImageSet | None = None
) -> list[tuple[str, ...]]:
    """Return the caption lines of the images in these rows of a table. images: those of the table, to show names."""
    lines: list[tuple[str, ...]] = []
    columns = [column[rows].tolist() for column in table]
    for index, label, predicted, probability in zip(*columns, strict=True):
        line = [f"true {classes[label]}", f"predicted {classes[predicted]}"]
        if predicted == label:
            line = [classes[label]]
        if images:
            line += [f"{probability:.4f}", images.name(index)]
        else:
            line.append(f"{probability:.4f} · #{index}")
        lines.append(tuple(line))
    return lines


def _pictures(data: ImageData, table: PredictionTable, rows: Tensor) -> list[Picture]:
    lines = captions(table, rows, data.classes, data.test_images)
    pictures = []
    for image, line in zip(data.test_images.images[table.indices[rows]], lines, strict=True):
        pictures.append(Picture(data_uri(image), f"Test image: {', '.join(line)}", line))
    return pictures
