"""Fit the temperature of recipes that have no validation images: python scripts/benchmarks/temperature.py laptop."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from script import run_script
from torch import Tensor
from torch.nn import functional as F
from train_once import run_once

import cifar_lit
from cifar_lit.bench.process import without_places
from cifar_lit.bench.report import Row, figures_of, publish, spread, write_figures
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import UsageError
from cifar_lit.runs.calibration import expected_calibration_error, reliability
from cifar_lit.runs.card import fit_temperature
from cifar_lit.runs.run_data import run_image_data
from cifar_lit.text import say

WHAT = (
    "Train a recipe with several seeds on a part of the training images, and fit the temperature on the other part. "
    "Report it with the test calibration error and cross-entropy before and after; plain predictions in float32. The "
    "temperature of least calibration error on the other part is reported too: it differs with many classes. With "
    "--val-size 0, train on all images and use the recipe's model.temperature. With --json, a stopped measurement "
    "resumes if the same command is run again. Other flags are passed to the trainings."
)
FIGURES = {
    "temperature": "temperature",
    "error": "calibration error before",
    "tempered_error": "calibration error after",
    "loss": "cross-entropy before",
    "tempered_loss": "cross-entropy after",
    "accuracy": "test accuracy",
    "least_error_temperature": "temperature of least error",
    "least_error": "calibration error at it",
    "least_error_loss": "cross-entropy at it",
}
GRID = [hundredths / 100 for hundredths in range(30, 201)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.set_defaults(flags=[])
    parser.add_argument("recipe", metavar="RECIPE", help="a packaged recipe, or a YAML file")
    parser.add_argument("--runs", type=int, default=5, help="number of seeds; runs in the --json file count")
    parser.add_argument("--seed0", type=int, default=0, help="the first seed")
    parser.add_argument("--val-size", type=float, default=0.1, help="share of the training images to fit on")


def run(settings: argparse.Namespace) -> None:
    """Measure and report. Finished runs are in the --json file even if the measurement is stopped."""
    if settings.runs < 1 or settings.seed0 < 0 or not 0 <= settings.val_size < 1:
        raise UsageError("--runs must be at least 1, --seed0 at least 0, and --val-size from 0 to below 1")
    # The data set is decoded once, for all runs of this process.
    SOURCES.update({name: replace(source, load=cache(source.load)) for name, source in SOURCES.items()})
    own = {**vars(settings), "flags": without_places(settings.flags)}
    own = {name: own[name] for name in ("recipe", "val_size", "flags")}
    file = Path(settings.json) if settings.json else None
    runs = finished_runs(file, own)
    for seed in range(settings.seed0, settings.seed0 + settings.runs):
        if seed not in runs:
            runs[seed] = measure(settings, seed)
            text = " · ".join(f"{name} {runs[seed][name]:.4f}" for name in FIGURES if name in runs[seed])
            say(f"{settings.recipe} seed {seed}: {text}")
            if file:
                write_figures(file, figures_of("temperature", own, rows_of(runs), runs=list(runs.values())))
    publish("temperature", {**own, "json": settings.json}, settings.recipe, rows_of(runs), runs=list(runs.values()))


def finished_runs(file: Path | None, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the runs in a file by seed; raise UsageError if they belong to another measurement."""
    if file is None or not file.exists():
        return {}
    try:
        figures = json.loads(file.read_text())
    except ValueError:
        figures = {}
    if figures.get("bench") != "temperature" or figures["settings"] != own:
        raise UsageError(f"{file} exists and has another measurement: name another --json file, or delete this one")
    return {one["seed"]: one for one in figures["runs"]}


def rows_of(runs: dict[int, dict[str, Any]]) -> list[Row]:
    """Return the spread of each figure over the runs."""
    figures = {name: [one[name] for one in runs.values() if name in one] for name in FIGURES}
    return [(FIGURES[name], spread(values), "") for name, values in figures.items() if values]


def measure(settings: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train with one seed; return the temperature, and test figures without and with it."""
    flags = [*settings.flags, "--devices", "1", "--model.tta", "none"]
    if settings.val_size:
        flags += ["--data.val_size", str(settings.val_size)]
    with tempfile.TemporaryDirectory(prefix="cifar-lit-temperature-") as logs:
        trained = run_once(settings.recipe, flags, seed, logs)
        run_dir = next(Path(logs).glob("*/model.safetensors")).parent
        classifier = cifar_lit.load(run_dir)
        data = run_image_data(run_dir, classifier.card)
    held_out, temperature, least_error = data.split[1], classifier.card.temperature, None
    if settings.val_size:
        labels = data.train_images.labels[held_out]
        logits = classifier(data.train_images.images[held_out].permute(0, 3, 1, 2))
        temperature = fit_temperature(logits, labels)
        least_error = min(GRID, key=lambda divisor: figures(logits.double() / divisor, labels)["error"])
    if temperature is None:
        raise UsageError("there is no temperature: use a recipe with model.temperature, or a larger --val-size")
    logits = classifier(data.test_images.images.permute(0, 3, 1, 2)).double()
    before, after = (figures(values, data.test_images.labels) for values in (logits, logits / temperature))
    at_least_error = {}
    if least_error:
        there = figures(logits / least_error, data.test_images.labels)
        at_least_error = {f"least_error{name}": there[key] for name, key in (("", "error"), ("_loss", "loss"))}
        at_least_error["least_error_temperature"] = least_error
    return {
        **{name: trained[name] for name in ("seed", "date", "precision", "seconds")},
        "temperature": temperature,
        "held_out": len(held_out),
        **before,
        **{f"tempered_{name}": after[name] for name in ("error", "loss")},
        **at_least_error,
    }


def figures(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, expected calibration error and mean cross-entropy of logits (N, classes), float64."""
    probability, predicted = logits.softmax(1).max(1)
    hits = predicted == labels
    return {
        "accuracy": float(hits.double().mean()),
        "error": expected_calibration_error(reliability(probability, hits)),
        "loss": float(F.cross_entropy(logits, torch.as_tensor(labels))),
    }


if __name__ == "__main__":
    raise SystemExit(run_script())
