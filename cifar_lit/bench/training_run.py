"""One run of a recipe in this process, as the `train` command makes it, with what it took."""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from cifar_lit.bench.curve import AccuracyCurve
from cifar_lit.cli.app import TrainingCLI
from cifar_lit.cli.flags import Command, parse
from cifar_lit.data.sources import SOURCES
from cifar_lit.errors import Failure
from cifar_lit.runs.run_folder import read_metrics

SHARED = (
    "The runs share one process, and the images, which are decoded and held once. Each has its own net, Trainer and run folder, "
    "and draws initial weights, order and augmentation from its seed."
)


@contextmanager
def images_held() -> Iterator[None]:
    """Within, each data set that is asked for again is handed over as it was loaded the first time."""
    before = dict(SOURCES)
    SOURCES.update({name: replace(source, load=cache(source.load)) for name, source in before.items()})
    try:
        yield
    finally:
        SOURCES.update(before)


class MeasuredTraining(TrainingCLI):
    """The `train` command with a look at the test accuracy on its way.

    curve_every: steps between looks, 0 for epoch ends, None for no look at all.
    """

    def __init__(self, command: Command, curve_every: int | None) -> None:
        self._every = curve_every
        self.curve: AccuracyCurve | None = None
        super().__init__(command)

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The command's own Trainer; from here on the device's memory is watched."""
        trainer = super().instantiate_trainer(**kwargs)
        device = trainer.strategy.root_device
        reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
        if reset:
            reset(device)
        if self._every is not None:
            self.curve = AccuracyCurve(self.run.clock, self._every)
            trainer.callbacks.append(self.curve)  # type: ignore[attr-defined]
        return trainer


def run_once(
    recipe: str, words: Sequence[str], seed: int, logs: str | None, curve_every: int | None, cold: bool
) -> dict[str, Any]:
    """Trains and tests a recipe with one seed; what it prints is not shown.

    recipe: a name or path. words: further flags of training. logs: folder for run folders, None for one that is deleted.
    cold: whether this is the process's first run, of which the time since the process started is of interest.

    Returns seed, data set, accelerator, precision, test accuracy and loss, with views if the run has any, seconds of the
    fit, training images a second, seconds from the process's start to the tested net (None if not cold), peak memory of
    the process and of the accelerator in MB, and the curve's points. Raises what the command raises.
    """
    with nullcontext(logs) if logs else tempfile.TemporaryDirectory(prefix="cifar-lit-bench-") as folder:
        command = parse("train", ["--recipe", recipe, *words, "--seed", str(seed), "--logs", str(folder)])
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            done = MeasuredTraining(command, curve_every)
        age = process_age() if cold else None
        metrics = read_metrics(done.run.folder.path)
        device = done.trainer.strategy.root_device
    if not (metrics.get("test") and metrics.get("train_seconds")):
        raise Failure(f"{recipe} with seed {seed} ended without a test: leave flags out that cut a run short")
    curve = done.curve
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    run = {
        "seed": seed,
        **{name: metrics[name] for name in ("dataset", "accelerator", "precision", "parameters")},
        "accuracy": metrics["test"]["accuracy"],
        "loss": metrics["test"]["loss"],
        "views": metrics["test"].get("tta"),
        "seconds": metrics["train_seconds"],
        "images_per_second": metrics["images_per_second"],
        "cold_seconds": round(age - (curve.spent if curve else 0.0), 2) if age is not None else None,
        "memory_mb": round(peak_memory() / 1e6),
        "device_memory_mb": round(peak(device) / 1e6) if peak else None,
        "curve": [[point.step, round(point.seconds, 3), point.accuracy] for point in curve.points] if curve else None,
    }
    del done, curve
    gc.collect()  # net and Trainer refer to each other, and would keep the device's memory until the next collection
    return run


def process_age() -> float | None:
    """Seconds since this process started, to a hundredth; None where the system does not tell (Linux does, in /proc)."""
    try:
        # the 22nd field of proc(5)'s stat, in clock ticks since boot; the second may hold spaces and ends with a bracket
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def peak_memory() -> int:
    """The most bytes of memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
