"""`cifar-lit bench devices`: what a GPU is good for, over batch sizes and widths."""

from __future__ import annotations

import argparse
from contextlib import suppress
from itertools import product
from typing import Any

from cifar_lit.bench.progress import Progress
from cifar_lit.bench.report import Row, publish, spread
from cifar_lit.bench.training import MAX_STEPS, Stopwatch, Subject, add_data_arguments, build, fit
from cifar_lit.errors import UsageError
from cifar_lit.hardware import Machine, choose_precision, detect_machine
from cifar_lit.training.orderly_stop import Interrupted

WHAT = (
    "The same training steps under the Trainer on the CPU and on each GPU, over batch sizes and widths of a net: seconds that an "
    "epoch of 50,000 images takes, from the images/s of some steps after a warm-up, and how many times as fast as the CPU each "
    "GPU is."
)
EPOCH = 50_000  # images, as CIFAR-10 has
SECONDS = 8.0  # of each training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    add_data_arguments(parser, dataset="shapes")
    parser.add_argument("--net", default="lenet", help="a net of ours, which has widths")
    parser.add_argument("--batch-sizes", default="4,64,512", help="images a step, with commas")
    parser.add_argument("--widths", default="1,4", help="multipliers of the net's hidden widths, with commas")
    parser.add_argument("--precision", help="each device's best if not given")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts")
    text = f"in a round; if not given, what takes {SECONDS:g} s for all rounds, at most {MAX_STEPS}"
    parser.add_argument("--steps", type=int, help=text)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")


def devices_of(machine: Machine) -> dict[str, dict[str, Any]]:
    """The CPU, then every GPU by itself: the Trainer's settings by name."""
    gpus = {f"gpu {number}, {name}": {"accelerator": "gpu", "devices": [number]} for number, (name, _) in enumerate(machine.gpus)}
    mps = {"mps": {"accelerator": "mps", "devices": 1}} if machine.mps else {}
    return {"cpu": {"accelerator": "cpu", "devices": 1}, **gpus, **mps}


def run(settings: argparse.Namespace) -> None:
    """Measures and reports."""
    try:
        batch_sizes = [int(text) for text in settings.batch_sizes.split(",")]
        widths = [float(text) for text in settings.widths.split(",")]
    except ValueError:
        raise UsageError("--batch-sizes and --widths take numbers with commas, such as 4,64") from None
    if settings.rounds < 1 or (settings.steps or 1) < 1 or settings.warmup < 1 or min(batch_sizes) < 1:
        raise UsageError("a measurement takes at least --warmup 1, --rounds 1 of --steps 1, and batches of 1")
    machine = detect_machine()
    every = devices_of(machine)
    kind = machine.kind(settings.accelerator)
    devices = {name: one for name, one in every.items() if settings.accelerator == "auto" or one["accelerator"] == kind}
    if not devices:
        raise UsageError(f"this machine has {machine}: leave --accelerator out")
    cells = list(product(batch_sizes, widths))
    trainings = len(cells) * len(devices)
    progress = Progress(trainings, "training")
    if settings.steps is None:
        progress.announce(trainings * SECONDS, f"at most, {trainings} trainings of some steps")
    rows: list[Row] = []
    with suppress(Interrupted):
        for number, (batch_size, width) in enumerate(cells):
            cpu_speeds: list[float] = []
            for place, (name, trainer) in enumerate(devices.items()):
                precision = settings.precision or choose_precision(machine, trainer["accelerator"])[0]
                speeds, precision = images_per_second(settings, batch_size, width, {**trainer, "precision": precision})
                where = f"{name}, batch {batch_size}, width {width:g}"
                rows.append((f"{where}, {precision}", spread(EPOCH / speed for speed in speeds), "s an epoch"))
                if name == "cpu":
                    cpu_speeds = speeds
                elif cpu_speeds:
                    pairs = zip(speeds, cpu_speeds, strict=False)  # slow devices have fewer rounds
                    ratio = spread(speed / cpu for speed, cpu in pairs)
                    rows.append((f"{where}, against the CPU", ratio, "× as fast"))
                progress.advance(number * len(devices) + place + 1, where)
    if not rows:
        return
    publish(
        "devices",
        vars(settings),
        f"{settings.net} · {settings.dataset}",
        rows,
        f"of {settings.rounds} rounds, scaled to an epoch of {EPOCH:,} images",
        *(() if len(every) > 1 else ("no GPU was found: the CPU stands alone",)),
    )


def images_per_second(
    settings: argparse.Namespace, batch_size: int, width: float, trainer: dict[str, Any]
) -> tuple[list[float], str]:
    """The speed in each round, and the precision that was computed in."""
    images = {"dataset": settings.dataset, "root": settings.root, "batch_size": batch_size, "count": settings.count}
    # a rate at which nothing learns much and nothing diverges, at any width
    data, model = build({"net": settings.net, "width": width, "lr": 1e-4}, {**images, "mean": 0.5, "std": 0.5})
    watch = Stopwatch(settings.steps, settings.rounds, settings.warmup, seconds=SECONDS)
    precision = fit(Subject(model, data, trainer), watch, max_epochs=100_000)
    return [turn.images / turn.ours for turn in watch.rounds], precision
