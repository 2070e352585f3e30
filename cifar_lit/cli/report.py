"""`cifar-lit report`: the page about a run, with a look at its training images."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from cifar_lit.cli.errors import parsed
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.image_set import ImageSet
from cifar_lit.data.progress import progress
from cifar_lit.errors import Failure, UsageError
from cifar_lit.hardware import keep_freed_memory, resolve_device
from cifar_lit.inference.load import Classifier, load
from cifar_lit.runs.charts import data_uri
from cifar_lit.runs.config_file import plain_values
from cifar_lit.runs.label_errors import exact_twins, nearest_embedding, pixel_difference, suspected_labels
from cifar_lit.runs.predictions import PredictionTable, fingerprint, read_outcomes, table_of
from cifar_lit.runs.report import SHOWN, Content, Findings, Pair, Picture, read_curves
from cifar_lit.runs.report import report as page
from cifar_lit.runs.run_folder import display_path, read_metrics, write_text

AT_ONCE = 2048  # images between two looks at the clock


def report(words: list[str]) -> None:
    """Makes report.html in a run's folder, anew where there is one, and says where it lies.

    Raises UsageError for what is no run or no data, Failure where the data are not those that the net was trained for.
    """
    parser = ArgumentParser(
        prog="cifar-lit report",
        description="Writes report.html, a page about a run: results, curves, calibration, mistakes, and, from a pass over the "
        "training images, suspected label errors and duplicates between train and test.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=str, help="a run folder, or a model.safetensors by itself")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--out", type=str | None, default=None, help="where to write it, if not beside the model")
    parser.add_argument("--dataset", type=str | None, default=None, help="the data set, where there is no config.yaml")
    parser.add_argument("--data-dir", type=str | None, default=None, help="where its images are, if not where they were")
    parser.add_argument("--device", type=str, default="auto", help="where to compute: auto, cpu, gpu, cuda:1, mps")
    settings = parsed(parser, words)
    classifier = load(settings.run, resolve_device(settings.device))
    keep_freed_memory()
    run = Path(settings.run).expanduser()
    run = run if run.is_dir() else run.parent
    out = Path(settings.out).expanduser() if settings.out else run / "report.html"
    content = look(classifier, data_of(run, classifier, settings), run)
    write_text(out, page(content))
    print(f"report {display_path(out)} · {out.stat().st_size / 1e6:.1f} MB")
    if settings.open:
        webbrowser.open(out.absolute().as_uri())


def data_of(run: Path, classifier: Classifier, settings: Namespace) -> ImageData:
    """The data that a run trained and tested on, or those that are named; of the classes that its net knows."""
    data_dir, card = settings.data_dir, classifier.card
    stored = settings_of(run).get("data")
    if settings.dataset:
        own: dict[str, Any] = {"image_size": classifier.size[0], "channels": classifier.channels}
        if settings.dataset == "shapes":
            own["num_classes"] = len(card.classes)
        stored = {"dataset": settings.dataset, **(own if settings.dataset in ("shapes", "folder") else {})}
    elif not isinstance(stored, dict):
        raise UsageError(
            f"{display_path(run)} has no config.yaml that names the data: give --dataset, and --data-dir where they lie"
        )
    try:
        data = ImageData(**{**stored, **({"root": data_dir} if data_dir else {})})
    except TypeError as error:
        raise Failure(
            f"{display_path(run / 'config.yaml')} has data settings of another version ({error}): give --dataset"
        ) from None
    if data.classes != classifier.classes:
        told = f"{_told(data.classes)}; {_told(classifier.classes)}"
        raise Failure(f"the data have other classes than the net ({told}): name its own with --dataset and --data-dir")
    if data.input_shape != card.input_shape:
        shapes = ["×".join(map(str, shape)) for shape in (data.input_shape, card.input_shape)]
        raise Failure(
            f"the data are images of {shapes[0]}, the net takes {shapes[1]}: name its own with --dataset and --data-dir"
        )
    return data


def settings_of(run: Path) -> dict[str, Any]:
    """What config.yaml holds; nothing where there is none."""
    try:
        found = plain_values(run / "config.yaml")
    except UsageError:
        return {}
    return found if isinstance(found, dict) else {}


def _told(classes: tuple[str, ...]) -> str:
    return f"{len(classes)}: {', '.join(classes[:3])}{', …' if len(classes) > 3 else ''}"


def look(classifier: Classifier, data: ImageData, run: Path) -> Content:
    """All that the page tells, from the run's own figures where these test images are those that it was tested on."""
    metrics = read_metrics(run)
    test, train = data.test_images, data.train_images
    tested = metrics.get("test") or {}
    recorded = tested.get("fingerprint")
    same = recorded == fingerprint(test.images, test.labels)
    outcomes = read_outcomes(run / "predictions.csv", data.classes) if same else None
    if recorded and not same:
        print("these are other test images than the run was tested on: they are scored anew", file=sys.stderr, flush=True)
        metrics = {**metrics, "test": None}
    logits, ours = passed(classifier, test, "test images")
    if outcomes is None:
        rows = torch.arange(len(test))
        outcomes = table_of({"indices": rows, "labels": test.labels, "probabilities": logits.double().softmax(1)})
    logits, theirs = passed(classifier, train, "training images")
    content = about(run, metrics, data, outcomes)
    return replace(content, findings=find(data, logits.softmax(1), theirs, ours, classifier.net.mean.device))


def passed(classifier: Classifier, images: ImageSet, what: str) -> tuple[Tensor, Tensor]:
    """float32 logits (N, classes) and embeddings (N, features) of a set, on the CPU."""
    found = []
    with progress(f"looking at the {what}", len(images)) as advance:
        for part in images.images.split(AT_ONCE):
            found.append(classifier.logits_and_embeddings(part.permute(0, 3, 1, 2)))
            advance(len(part))
    logits, embeddings = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(embeddings)


def about(run: Path, metrics: Mapping[str, Any], data: ImageData, outcomes: PredictionTable) -> Content:
    """The page's content without a look at the training images."""
    config = run / "config.yaml"
    name = shlex.quote(display_path(run))
    commands = [("The page anew, with suspected labels and duplicates", f"cifar-lit report {name}")]
    if config.is_file():
        commands.insert(0, ("The training and its test", f"cifar-lit train --config {shlex.quote(display_path(config))}"))
    for checkpoint in ("best", "last"):
        path = run / "checkpoints" / f"{checkpoint}.ckpt"
        if path.is_file():
            commands.insert(1, ("The test alone", f"cifar-lit test --ckpt_path {shlex.quote(display_path(path))}"))
            break
    return Content(
        title=run.absolute().name,
        classes=data.classes,
        outcomes=outcomes,
        images=data.test_images.images,
        metrics=metrics,
        config=config.read_text() if config.is_file() else "",
        curves=read_curves(run / "metrics.csv"),
        commands=commands,
    )


def find(data: ImageData, probabilities: Tensor, theirs: Tensor, ours: Tensor, device: torch.device) -> Findings:
    """Suspected labels among the training images, and what the test images repeat of them.

    probabilities: (N, classes) of the training images. theirs, ours: embeddings of the training and the test images.
    device: where to compare them.
    """
    train, test, classes = data.train_images, data.test_images, data.classes
    suspects = suspected_labels(probabilities, train.labels)
    held_out = set(data.split[1].tolist())
    pictures = []
    for row, other, own, best in zip(*(values[:SHOWN].tolist() for values in suspects[:4]), strict=True):
        label, said = classes[int(train.labels[row])], classes[other]
        alt = f"Training image {row}: labelled {label} with probability {own:.2f}, taken for {said} with {best:.2f}"
        note = " · held out" if row in held_out else ""
        pictures.append(
            Picture(data_uri(train.images[row]), alt, (f"label {label} {own:.3f}", f"said {said} {best:.3f}", f"no. {row}{note}"))
        )

    twins = exact_twins(train.images, test.images)
    repeated = twins >= 0
    contrary = int((train.labels[twins[repeated]] != test.labels[repeated]).sum())
    with progress("comparing test with training images", len(test)) as advance:
        cosines, rows = (found.cpu() for found in nearest_embedding(theirs.to(device), ours.to(device), advance=advance))
    ranked = cosines.masked_fill(repeated, -2.0).argsort(descending=True, stable=True)
    pairs = []
    for place in ranked[: min(SHOWN, int((~repeated).sum()))].tolist():
        row = int(rows[place])
        difference = pixel_difference(test.images[place], train.images[row])
        lines = (f"cosine {float(cosines[place]):.4f}", f"difference {difference:.1f}")
        pairs.append(Pair(_side("Test", test, place), _side("Training", train, row), lines))
    return Findings(
        len(train), len(test), pictures, len(suspects.rows), int(suspects.counted.sum()), pairs, int(repeated.sum()), contrary
    )


def _side(what: str, images: ImageSet, number: int) -> Picture:
    label = images.classes[int(images.labels[number])]
    return Picture(
        data_uri(images.images[number]), f"{what} image {number}: {label}", (f"{what[:5].rstrip().lower()} {number}", label)
    )
