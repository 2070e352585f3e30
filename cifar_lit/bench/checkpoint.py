"""`cifar-lit bench checkpoint`: what it costs that checkpoints are always whole."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback

from cifar_lit.bench.report import environment, footer, headline, settings_of, show, shown_spread, spread, write_figures
from cifar_lit.bench.training import add_training_arguments, fit, subject
from cifar_lit.errors import Failure, UsageError
from cifar_lit.training.checkpoint import AtomicCheckpointIO, append_checksum, find_damage, read_checkpoint

WHAT = (
    "Milliseconds of a recipe's checkpoint: to write it, to give it its checksum, to bring it to the disk, to verify and to load "
    "it; and what checksum and disk are of an epoch. Files are written where it is started, as run folders are."
)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of this measurement."""
    add_training_arguments(parser, recipe="laptop")
    parser.add_argument("--rounds", type=int, default=30, help="checkpoints written, after one to warm up")
    parser.add_argument("--images", type=int, default=50_000, help="images of the epoch that a checkpoint is compared with")


class Epochs(Callback):
    """Times the second of two epochs, and keeps the checkpoint of the end."""

    takes_chunks = True

    def __init__(self) -> None:
        self.seconds = 0.0
        self.checkpoint: dict[str, Any] = {}
        self._started = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The clock starts anew."""
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last epoch's time stays; what the device still has to do is waited for."""
        float(pl_module.sums.last)  # type: ignore[union-attr, arg-type]
        self.seconds = time.perf_counter() - self._started

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps what is about to be written; other callbacks go on filling it."""
        self.checkpoint = checkpoint


def run(settings: Namespace) -> None:
    """Measures and reports."""
    if settings.rounds < 2 or settings.images < 1:
        raise UsageError("a measurement takes at least --rounds 2 and --images 1")
    what = subject(settings)
    epochs = Epochs()
    settings.precision = fit(what, epochs, max_epochs=2)
    trained = len(what.data.split[0])
    if not epochs.checkpoint or not epochs.seconds:
        raise Failure("the training wrote no checkpoint: give it more images with --count")
    epoch = epochs.seconds * settings.images / trained
    times: dict[str, list[float]] = {name: [] for name in ("write", "checksum", "disk", "all of it", "verify", "load")}
    try:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=".") as folder:
            size = 0
            for number in range(settings.rounds + 1):
                found = one_round(epochs.checkpoint, Path(folder))
                size = int(found.pop("bytes"))
                for name, seconds in found.items():
                    if number:
                        times[name].append(1000 * seconds)
    except OSError as error:
        raise Failure(f"cannot write checkpoints here: {error.strerror}") from None
    report(settings, {name: spread(values) for name, values in times.items()}, size, epoch)


def one_round(checkpoint: dict[str, Any], folder: Path) -> dict[str, float]:
    """Seconds of the parts of writing and reading a checkpoint in `folder`, and its `bytes`."""
    moments = [time.perf_counter()]
    path = folder / "parts.ckpt"
    with path.open("w+b") as file:
        torch.save(checkpoint, file)
        file.flush()
        moments.append(time.perf_counter())
        append_checksum(file)
        moments.append(time.perf_counter())
        os.fsync(file.fileno())
        moments.append(time.perf_counter())
    AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "last.ckpt")
    moments.append(time.perf_counter())
    find_damage(folder / "last.ckpt")
    moments.append(time.perf_counter())
    read_checkpoint(folder / "last.ckpt")
    moments.append(time.perf_counter())
    names = ("write", "checksum", "disk", "all of it", "verify", "load")
    taken = {name: after - before for name, before, after in zip(names, moments[:-1], moments[1:], strict=True)}
    return {**taken, "bytes": float(path.stat().st_size)}


def report(settings: Namespace, times: dict[str, dict[str, float]], size: int, epoch: float) -> None:
    """Prints and writes what was found; `times` in ms, `epoch` in seconds."""
    added = times["checksum"]["median"] + times["disk"]["median"]
    share = 100 * added / 1000 / epoch
    figures: dict[str, Any] = {
        "bench": "checkpoint",
        "settings": settings_of(settings),
        "bytes": size,
        "ms": times,
        "epoch_seconds": round(epoch, 2),
        **headline(
            ("checksum of a checkpoint", times["checksum"], "ms"),
            ("bringing it to the disk", times["disk"], "ms"),
            (f"both, of an epoch of {epoch:.0f} s", share, "%"),
        ),
        "environment": environment(),
    }
    if settings.json:
        write_figures(Path(settings.json), figures)
    rows = [[name, shown_spread(found, ",.1f")] for name, found in times.items()]
    lines = (
        "verify is part of load; all of it is written, sealed, synced with its folder, renamed, the previous one kept",
        f"checksum and disk: {added:.1f} ms, {share:.3f} % of an epoch of {epoch:.1f} s ({settings.images:,} images)",
    )
    show(f"a checkpoint of {size / 1e6:.1f} MB", ("", "ms"), rows, *lines, footer(figures))
