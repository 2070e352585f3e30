"""`cifar-lit drill soak`: hundreds of short epochs with logging and checkpoints; memory, open files and disk must stay flat."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, write_figures
from cifar_lit.drills.forked import Forked, warm
from cifar_lit.errors import Failure, UsageError

WHAT = (
    "Trains a small net for hundreds of short epochs, with curves and checkpoints as in any run, and compares memory, files, "
    "threads and disk early on with those at the end. Curves grow by the epoch, as they must; nothing else may."
)
TRAINING = [
    *("train", "--recipe", "quickstart", "--accelerator", "cpu", "--precision", "32-true", "--net", "lenet"),
    *("--data.count", "60", "--data.val_size", "20", "--data.image_size", "16", "--batch-size", "8", "--data.crop", "2"),
    *("--model.ema_decay", "0.9", "--checkpoint-every", "2", "--trainer.log_every_n_steps", "1", "--data.chunk", "1"),
    "--trainer.callbacks=cifar_lit.drills.soak.Samples",
]
VARIABLE = "CIFAR_LIT_SOAK"  # the epochs to sample at, and the file to write to
GROWTH = 0.02  # of memory, between the two samples: what an allocator may still do
LIMIT = 3600.0


class Samples(Callback):
    """At the epochs that VARIABLE names writes what the process holds to a file, a line of JSON each."""

    takes_chunks = True

    def __init__(self) -> None:
        epochs, _, self._file = os.environ.get(VARIABLE, "").partition(":")
        self._epochs = [int(epoch) for epoch in epochs.split(",") if epoch]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A sample after an epoch is taken before the next, when its checkpoints are written."""
        if trainer.current_epoch in self._epochs:
            gc.collect()
            folder = Path(str(trainer.checkpoint_callbacks[0].dirpath)).parent  # type: ignore[attr-defined]
            with Path(self._file).open("a") as file:
                file.write(json.dumps({"epoch": trainer.current_epoch, **held(folder)}) + "\n")


def held(folder: Path) -> dict[str, int]:
    """What this process holds: memory (bytes resident), open files, threads; and of `folder` files and bytes, curves apart."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    curves = [path for path in sizes if path.name == "metrics.csv" or "tfevents" in path.name]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "files": len(sizes),
        "disk": sum(size for path, size in sizes.items() if path not in curves),
        "curves": sum(sizes[path] for path in curves),
    }


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this drill."""
    parser.add_argument("--epochs", type=int, default=500, help="how many")
    parser.add_argument("--early", type=int, default=50, help="the epoch that the last is compared with")


SHORT = {"epochs": 40, "early": 20}


def run(settings: Namespace) -> None:
    """Drills and reports; raises Failure when something grew."""
    if not 1 <= settings.early < settings.epochs:
        raise UsageError("--early must be an epoch before the last of --epochs")
    if not Path("/proc/self/statm").exists():
        raise UsageError("this drill reads /proc, which this system does not have: run it on Linux")
    warm()
    with tempfile.TemporaryDirectory(prefix="cifar-lit-drill-") as name:
        folder = Path(name)
        asked = f"{settings.early},{settings.epochs}:{folder / 'samples.txt'}"
        # one epoch more, as a sample is taken before an epoch starts
        words = [*TRAINING, "--epochs", str(settings.epochs + 1)]
        training = Forked(words, folder / "run", folder / "log.txt", more={VARIABLE: asked})
        if any(training.wait(LIMIT)):
            raise Failure(f"the training failed: {training.log.read_text()[-500:]}")
        early, late = (json.loads(line) for line in (folder / "samples.txt").read_text().splitlines())
    report(settings, early, late)


def grown(early: dict[str, int], late: dict[str, int]) -> list[str]:
    """What is larger than it may be, between two samples."""
    allowed = {"memory": early["memory"] * (1 + GROWTH), "disk": early["disk"] * (1 + GROWTH)}
    return [name for name in ("memory", "open_files", "threads", "files", "disk") if late[name] > allowed.get(name, early[name])]


def report(settings: Namespace, early: dict[str, int], late: dict[str, int]) -> None:
    """Prints both samples, and writes the figures; raises Failure when something grew."""
    per_epoch = (late["curves"] - early["curves"]) / (late["epoch"] - early["epoch"])
    growth = late["memory"] / early["memory"] - 1
    figures: dict[str, Any] = {
        "bench": "soak",
        "command": "drill soak",
        "settings": settings_of(settings),
        "samples": [early, late],
        "curves_bytes_per_epoch": round(per_epoch, 1),
        **headline(
            (f"memory after {late['epoch']} epochs against after {early['epoch']}", 1 + growth, "×"),
            ("open files more", late["open_files"] - early["open_files"], ""),
            ("disk but for curves", late["disk"] / early["disk"], "×"),
        ),
        "environment": environment(),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    names = {
        "memory": "memory, MB",
        "open_files": "open files",
        "threads": "threads",
        "files": "files in the run folder",
        "disk": "its size without curves, kB",
        "curves": "its curves, kB",
    }
    units = {"memory": 1e6, "disk": 1e3, "curves": 1e3}
    rows = [
        [label, *(f"{sample[name] / units[name]:,.1f}" if name in units else str(sample[name]) for sample in (early, late))]
        for name, label in names.items()
    ]
    columns = ("", f"after {early['epoch']} epochs", f"after {late['epoch']}")
    show("what a training holds", columns, rows, f"curves grow by {per_epoch:,.0f} bytes an epoch", footer(figures))
    if wrong := grown(early, late):
        raise Failure(f"grew between epoch {early['epoch']} and {late['epoch']}: {', '.join(wrong)}")
