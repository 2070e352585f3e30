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
from cifar_lit.runs.calibration import expected_calibration_error, reliability
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.figures import (
    GALLERY_SIZE,
    PART_NAMES,
    Picture,
    confusion_matrix,
    data_uri,
    line_chart,
    reliability_diagram,
)
from cifar_lit.runs.label_errors import Findings, find_duplicates, find_nearest, suspect_labels
from cifar_lit.runs.predictions import PredictionTable, fingerprint, prediction_table, read_predictions
from cifar_lit.runs.run_folder import display_path, read_curves, read_metrics
from cifar_lit.stats import wilson_interval
from cifar_lit.text import note, printable

if TYPE_CHECKING:
    from cifar_lit.data.datamodule import ImageData

MAX_TABLE_CLASSES = 20  # up to which the confusion matrix is a table; beyond, a picture
PARTS = ("train", "val", "test")  # whose curves share a chart: `val/loss` is drawn beside `train/loss`
FIRST_CHARTS = ("loss", "accuracy", "lr", "weight_norm")  # the others follow as they were logged
TITLES = {"lr": "learning rate", "macro_f1": "macro F1", "top5": "top-5 accuracy"}

# From a function that returns the images of rows, the rows, and a progress callback, to logits and embeddings (N, …).
Look = Callable[[Callable[[Tensor], Tensor], Tensor, Callable[[int], None]], tuple[Tensor, Tensor]]


def inspected_page(run: Path, data: ImageData, look: Look, device: str) -> str:
    """The page with a look at the training images, of the run's own figures where it was tested on these test images.

    look: `inference.embeddings.logits_and_embeddings` of the run's net. device: where to compare the embeddings.
    """
    metrics, (train, held_out), test = read_metrics(run), _train_images(data), data.test_images
    recorded = (metrics.get("test") or {}).get("fingerprint")
    same = recorded == fingerprint(test.images, test.labels)
    predictions = read_predictions(run / "predictions.csv", data.classes, len(test)) if same else None
    if recorded and not same:
        note("these are other test images than the run was tested on: they are scored anew")
        metrics = {**metrics, "test": None}
    logits, embeddings = _looked_at(look, test, "test images")
    if predictions is None:
        scored = {
            "indices": torch.arange(len(test)),
            "labels": test.labels,
            "probabilities": logits.double().softmax(1),
        }
        predictions = prediction_table(scored)
    train_logits, known = _looked_at(look, train, "training images")
    with progress("comparing test with training images", len(test)) as advance:
        nearest = find_nearest(known.to(device), embeddings.to(device), advance)
    findings = Findings(
        suspect_labels(train, train_logits.softmax(1), "Training", held_out),
        suspect_labels(test, logits.softmax(1), "Test"),
        *find_duplicates(train, test, *nearest),
    )
    return render(run, metrics, data, predictions, findings)


def _train_images(data: ImageData) -> tuple[ImageSet, set[int]]:
    """The training images, and the rows of those that were held out for validation.

    Test images are among the images to train on in a cross-validation, and where val/ is the test set too: these are left out.
    """
    train, tested = data.train_images, set(data.test_images.names or ())
    is_held_out, is_kept = torch.zeros(len(train), dtype=torch.bool), torch.ones(len(train), dtype=torch.bool)
    is_held_out[data.split[1]] = True
    if data.parts.folds:
        is_kept[data.parts.fold_rows] = False
    elif train.names:
        is_kept = torch.tensor([name not in tested for name in train.names])
    if not is_kept.all():
        train = ImageSet(train.images[is_kept], train.labels[is_kept], train.classes)
    return train, set(is_held_out[is_kept].nonzero()[:, 0].tolist())


def _looked_at(look: Look, images: ImageSet, what: str) -> tuple[Tensor, Tensor]:
    with progress(f"looking at the {what}", len(images)) as advance:
        return look(images.take, torch.arange(len(images)), advance)


def render(
    run: Path,
    metrics: Mapping[str, Any],
    data: ImageData,
    predictions: PredictionTable,
    findings: Findings | None = None,
) -> str:
    """The page as HTML. Every name in it is escaped: of classes, and of whatever else comes from outside.

    metrics: of metrics.json. predictions: of the test images. findings: None where the training images were not looked at.
    """
    classes = data.classes
    matrix = predictions.confusion(len(classes))
    bins = reliability(predictions.probability, predictions.hits)
    error = expected_calibration_error(bins)
    matrix_uri = None
    if len(classes) > MAX_TABLE_CLASSES:
        matrix_uri = data_uri(confusion_matrix(matrix, classes).permute(1, 2, 0), largest=4096)
    config, config_text = run / "config.yaml", ""
    with suppress(OSError, UnicodeDecodeError):  # there is none, or a stranger's that is no text
        config_text = read_text(config)
    reproduce = {
        "Train and test again": ("train --config", [config]),
        "Test again": ("test --ckpt_path", [run / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]),
        "Write this page again, with suspected labels and duplicates": ("report", [run]),
    }
    commands = []
    for what, (command, places) in reproduce.items():
        if place := next(filter(Path.exists, places), None):
            commands.append((what, f"cifar-lit {command} {shlex.quote(display_path(place))}"))
    page = Environment(loader=PackageLoader("cifar_lit.runs", "pages"), autoescape=True, undefined=StrictUndefined,
                       finalize=_shown, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return page.get_template("report.html.j2").render(
        title=run.absolute().name,
        config=config_text,
        commands=commands,
        metrics=metrics,
        classes=classes,
        findings=findings,
        images=len(predictions.labels),
        right=int(predictions.hits.sum()),
        interval=wilson_interval(int(predictions.hits.sum()), len(predictions.labels)),
        summary=_summary(metrics),
        charts=_charts(read_curves(run)),
        smoothing=_label_smoothing(config),
        matrix=matrix.tolist(),
        matrix_uri=matrix_uri,
        predicted_counts=matrix.sum(0).tolist(),
        confused=_most_confused(matrix, classes),
        bins=bins,
        error=error,
        calibration=(metrics.get("test") or {}).get("calibration"),
        mean=float(predictions.probability.mean()),
        diagram=reliability_diagram(
            "reliability", bins, f"Reliability diagram: expected calibration error {error:.4f}"
        ),
        mistakes=_pictures(data, predictions, predictions.confident_mistakes(GALLERY_SIZE)),
        doubtful=_pictures(data, predictions, predictions.doubtful_hits(GALLERY_SIZE)),
    )


def _label_smoothing(config: Path) -> float:
    """Return the label smoothing in a config.yaml; 0 if the file is missing or cannot be read."""
    try:
        value = plain_values(config)["model"]["label_smoothing"] if config.is_file() else 0.0
    except (UsageError, KeyError, TypeError):
        return 0.0
    return value if isinstance(value, int | float) else 0.0


def _shown(value: Any) -> Any:
    """A value of the page: of text each line as `printable`, but for charts, which are HTML."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return "\n".join(map(printable, value.split("\n"))) if is_text else value


def _summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts of metrics.json by name, those that are there, with all figures of the test and the validation."""
    forms = {
        "recipe": "{}", "net": "{}", "parameters": "{:,}", "dataset": "{}", "epochs": "{:,}", "batch_size": "{:,}",
        "seed": "{}", "precision": "{}", "accelerator": "{}", "train_seconds": "{:,.1f} s", "images_per_second": "{:,.0f}",
    }  # fmt: skip
    if metrics.get("accelerator") is not None:
        metrics = {**metrics, "accelerator": f"{metrics.get('devices', 1)} × {metrics['accelerator']}"}
    known = [name for name in forms if metrics.get(name) is not None]
    facts = [(name.replace("_", " "), forms[name].format(metrics[name])) for name in known]
    for part, what in (("test", "test"), ("val", "validation")):
        for name, value in (metrics.get(part) or {}).items():
            headline = name == "images" or (part, name) == ("test", "accuracy")
            if isinstance(value, int | float) and not headline:
                facts.append((f"{what} {name.replace('_', ' ')}", f"{value:.4f}"))
            elif name == "tta" and isinstance(value, dict):
                facts.append((f"{what} accuracy with {value['views']} views", f"{value['accuracy']:.4f}"))
    return facts


def _charts(curves: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
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
            last = ", ".join(
                f"{PART_NAMES.get(part, part)} ends at {points[-1][1]:.4g}" for part, points in ordered.items()
            )
            title = TITLES.get(name, name.replace("_", " "))
            drawn.append(
                (title, line_chart(f"chart-{len(drawn)}", ordered, f"{title.capitalize()} over training steps: {last}"))
            )
    return drawn


def _most_confused(matrix: Tensor, classes: Sequence[str], most: int = 10) -> list[tuple[str, str, int, float]]:
    """Label, predicted class, images and their fraction of the label's, for the pairs that are confused most often."""
    wrong, totals = matrix.clone().fill_diagonal_(0), matrix.sum(1)
    places = wrong.flatten().argsort(descending=True, stable=True)[:most]
    cells = [(*divmod(place, len(classes)), int(wrong.flatten()[place])) for place in places.tolist()]
    return [
        (classes[row], classes[column], images, images / int(totals[row])) for row, column, images in cells if images
    ]


def captions(table: PredictionTable, places: Tensor, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """The lines below each image at these places of a table; the predicted class where it differs from the label."""
    lines: list[tuple[str, ...]] = []
    columns = (table.indices, table.labels, table.predicted, table.probability)
    for index, label, predicted, probability in zip(*(column[places].tolist() for column in columns), strict=True):
        names = (
            (classes[label],) if predicted == label else (f"true {classes[label]}", f"predicted {classes[predicted]}")
        )
        lines.append((*names, f"{probability:.4f} · no. {index}"))
    return lines


def _pictures(data: ImageData, table: PredictionTable, places: Tensor) -> list[Picture]:
    images = data.test_images.images[table.indices[places]]
    lines = captions(table, places, data.classes)
    return [
        Picture(data_uri(image), f"Test image: {', '.join(line)}", line)
        for image, line in zip(images, lines, strict=True)
    ]
