"""`cifar-lit bench devices`: what a GPU is good for, over batch sizes and widths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from cifar_lit.bench.clock import Lap, Stopwatch
from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures
from cifar_lit.bench.training import Subject, add_data_arguments, build, fit
from cifar_lit.errors import UsageError
from cifar_lit.hardware import Machine, choose_precision, detect_machine

WHAT = (
    "The same training steps under the Trainer on the CPU and on each GPU, over batch sizes and widths of a net: seconds that an "
    "epoch of 50,000 images takes, from the images/s of some steps after a warm-up (with --full of whole epochs of the data), "
    "and how many times as fast as the CPU each GPU is."
)
EPOCH = 50_000  # images, as CIFAR-10 has


class Column(NamedTuple):
    """A device: its name in the table, and accelerator and devices as the Trainer takes them."""

    name: str
    accelerator: str
    devices: Any


def columns(machine: Machine) -> list[Column]:
    """The CPU, then every GPU by itself."""
    gpus = [Column(f"gpu {number}, {name}", "gpu", [number]) for number, (name, _) in enumerate(machine.gpus)]
    return [Column("cpu", "cpu", 1), *gpus, *([Column("mps", "mps", 1)] if machine.mps else [])]


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_data_arguments(parser, dataset="shapes")
    parser.add_argument("--net", type=str, default="lenet", help="a net of ours, which has widths")
    parser.add_argument("--batch-sizes", type=str, default="4,64,512", help="images a step, with commas")
    parser.add_argument("--widths", type=str, default="1,4", help="multipliers of the net's hidden widths, with commas")
    parser.add_argument("--precision", type=str | None, default=None, help="each device's best if not given")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=50, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")
    parser.add_argument("--full", action="store_true", help="whole epochs of the data in place of --steps")


def run(settings: Namespace) -> None:
    """Measures and reports."""
    batch_sizes = [int(value) for value in _numbers(settings.batch_sizes, "--batch-sizes")]
    widths = _numbers(settings.widths, "--widths")
    if settings.rounds < 1 or settings.steps < 1 or settings.warmup < 1 or min(batch_sizes) < 1:
        raise UsageError("a measurement takes at least --warmup 1, --rounds 1 of --steps 1, and batches of 1")
    machine = detect_machine()
    found = columns(machine)
    if settings.accelerator != "auto":
        found = [column for column in found if column.accelerator == settings.accelerator]
    if not found:
        raise UsageError(f"this machine has {machine}: leave --accelerator out")
    cells = [
        {"batch_size": size, "width": width, "device": column.name, **_measure(settings, machine, size, width, column)}
        for size in batch_sizes
        for width in widths
        for column in found
    ]
    figures = figures_of(settings, cells)
    if settings.json:
        write_figures(Path(settings.json), figures)
    how = "whole epochs of the data, scaled" if settings.full else f"{settings.steps} steps after {settings.warmup}, scaled"
    show(
        f"bench devices · {settings.net} · {settings.dataset}",
        ("batch", "width", "device", "precision", "s an epoch", "images/s", "× the CPU"),
        table_rows(figures["cells"]),
        f"medians (quartiles) of {settings.rounds} rounds of {how} to an epoch of {EPOCH:,} images",
        *(() if len(columns(machine)) > 1 else ("no GPU was found: the CPU stands alone",)),
        footer(figures),
    )


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} takes numbers with commas, such as 4,64, not {text!r}") from None


def _measure(settings: Namespace, machine: Machine, batch_size: int, width: float, column: Column) -> dict[str, Any]:
    given = {"dataset": settings.dataset, "root": settings.root, "batch_size": batch_size, "count": settings.count}
    # a rate at which nothing learns much and nothing diverges, at any width
    data, model = build({"net": settings.net, "width": width, "lr": 1e-4}, {**given, "mean": 0.5, "std": 0.5})
    precision = settings.precision or choose_precision(machine, column.accelerator)[0]
    steps = -(-len(data.split[0]) // batch_size) if settings.full else settings.steps
    watch = Stopwatch(settings.warmup, steps, settings.rounds)
    what = Subject(model, data, column.accelerator, column.devices, precision, {})
    precision = fit(what, watch, max_epochs=100_000)
    return {"precision": precision, "parameters": model.parameter_count, **cell(watch.laps)}


def cell(laps: Sequence[Lap]) -> dict[str, Any]:
    """Images a second, and seconds of an epoch of `EPOCH` images, from laps."""
    return {
        "images_per_second": spread(lap.images / lap.seconds for lap in laps),
        "epoch_seconds": spread(EPOCH * lap.seconds / lap.images for lap in laps),
    }


def figures_of(settings: Namespace, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures; `speed_up` of a cell is over the CPU at the same batch size and width, None for the CPU itself."""
    places = [(found["batch_size"], found["width"]) for found in cells]
    cpu = {place: found for place, found in zip(places, cells, strict=True) if found["device"] == "cpu"}

    def speed_up(place: tuple[int, float], found: dict[str, Any]) -> float | None:
        if found["device"] == "cpu" or place not in cpu:
            return None
        return round(cpu[place]["epoch_seconds"]["median"] / found["epoch_seconds"]["median"], 3)

    full = [{**found, "speed_up": speed_up(place, found)} for place, found in zip(places, cells, strict=True)]
    labels = [f"{found['device']}, batch {found['batch_size']}, width {found['width']:g}" for found in full]
    return {
        "bench": "devices",
        "settings": settings_of(settings),
        "environment": environment(),
        **headline(*((label, found["epoch_seconds"], "s an epoch") for label, found in zip(labels, full, strict=True))),
        "epoch_images": EPOCH,
        "cells": full,
    }


def table_rows(cells: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The cells as text, in their order."""
    return [
        (
            str(found["batch_size"]),
            f"{found['width']:g}",
            found["device"],
            found["precision"],
            shown_spread(found["epoch_seconds"], ".2f"),
            shown_spread(found["images_per_second"]),
            "" if found["speed_up"] is None else f"{found['speed_up']:.2f}",
        )
        for found in cells
    ]
