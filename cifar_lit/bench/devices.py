"""`cifar-lit bench devices`: what a GPU is good for, over batch sizes and widths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from cifar_lit.bench.report import figures_of, publish, spread, spread_text
from cifar_lit.bench.training import Lap, Stopwatch, Subject, add_data_arguments, build, fit
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_data_arguments(parser, dataset="shapes")
    parser.add_argument("--net", default="lenet", help="a net of ours, which has widths")
    parser.add_argument("--batch-sizes", default="4,64,512", help="images a step, with commas")
    parser.add_argument("--widths", default="1,4", help="multipliers of the net's hidden widths, with commas")
    parser.add_argument("--precision", help="each device's best if not given")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=50, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")
    parser.add_argument("--full", action="store_true", help="whole epochs of the data in place of --steps")


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    batch_sizes = [int(value) for value in _numbers(settings.batch_sizes, "--batch-sizes")]
    widths = _numbers(settings.widths, "--widths")
    if settings.rounds < 1 or settings.steps < 1 or settings.warmup < 1 or min(batch_sizes) < 1:
        raise UsageError("a measurement takes at least --warmup 1, --rounds 1 of --steps 1, and batches of 1")
    machine = detect_machine()
    chosen = [column for column in columns(machine) if settings.accelerator in ("auto", column.accelerator)]
    if not chosen:
        raise UsageError(f"this machine has {machine}: leave --accelerator out")
    cells = with_speed_up([_measure(settings, machine, *place) for place in product(batch_sizes, widths, chosen)])
    names = [f"{cell['device']}, batch {cell['batch_size']}, width {cell['width']:g}" for cell in cells]
    rows = [(name, cell["epoch_seconds"], "s an epoch") for name, cell in zip(names, cells, strict=True)]
    how = "whole epochs of the data, scaled" if settings.full else f"{settings.steps} steps after {settings.warmup}, scaled"
    publish(
        figures_of("devices", vars(settings), *rows, epoch_images=EPOCH, cells=cells),
        settings.json,
        f"bench devices · {settings.net} · {settings.dataset}",
        ("batch", "width", "device", "precision", "s an epoch", "images/s", "× the CPU"),
        [
            (
                str(cell["batch_size"]),
                f"{cell['width']:g}",
                cell["device"],
                cell["precision"],
                spread_text(cell["epoch_seconds"], ".2f"),
                spread_text(cell["images_per_second"]),
                "" if cell["speed_up"] is None else f"{cell['speed_up']:.2f}",
            )
            for cell in cells
        ],
        f"medians (quartiles) of {settings.rounds} rounds of {how} to an epoch of {EPOCH:,} images",
        *(() if len(columns(machine)) > 1 else ("no GPU was found: the CPU stands alone",)),
    )


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} takes numbers with commas, such as 4,64, not {text!r}") from None


def _measure(settings: argparse.Namespace, machine: Machine, batch_size: int, width: float, column: Column) -> dict[str, Any]:
    images = {"dataset": settings.dataset, "root": settings.root, "batch_size": batch_size, "count": settings.count}
    # a rate at which nothing learns much and nothing diverges, at any width
    data, model = build({"net": settings.net, "width": width, "lr": 1e-4}, {**images, "mean": 0.5, "std": 0.5})
    precision = settings.precision or choose_precision(machine, column.accelerator)[0]
    watch = Stopwatch(settings.warmup, -(-len(data.split[0]) // batch_size) if settings.full else settings.steps, settings.rounds)
    precision = fit(Subject(model, data, column.accelerator, column.devices, precision, {}), watch, max_epochs=100_000)
    parameters = sum(parameter.numel() for parameter in model.net.parameters())
    place = {"batch_size": batch_size, "width": width, "device": column.name, "precision": precision, "parameters": parameters}
    return place | speeds_of(watch.laps)


def speeds_of(laps: Sequence[Lap]) -> dict[str, Any]:
    """Images a second, and seconds of an epoch of `EPOCH` images, from laps."""
    return {
        "images_per_second": spread(lap.images / lap.seconds for lap in laps),
        "epoch_seconds": spread(EPOCH * lap.seconds / lap.images for lap in laps),
    }


def with_speed_up(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds `speed_up`: over the CPU at the same batch size and width, None for the CPU itself."""
    cpu = {(cell["batch_size"], cell["width"]): cell["epoch_seconds"]["median"] for cell in cells if cell["device"] == "cpu"}

    def speed_up(cell: dict[str, Any]) -> float | None:
        seconds = cpu.get((cell["batch_size"], cell["width"]))
        return None if seconds is None or cell["device"] == "cpu" else round(seconds / cell["epoch_seconds"]["median"], 3)

    return [{**cell, "speed_up": speed_up(cell)} for cell in cells]
