"""What is measured: a recipe's model and data, fitted by the Trainer with everything on that a run has on; and clocks."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import rich
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_devices, choose_precision, detect_machine
from cifar_lit.runs.run_folder import RunFolder
from cifar_lit.train import Run
from cifar_lit.training.callbacks import NoProfiler
from cifar_lit.training.classifier import ImageClassifier

LINEAR = "linear"  # a net of a single layer, which only measurements know
WITHOUT_RECIPE: dict[str, Any] = {"model": {"lr": 0.01}, "data": {"dataset": "shapes", "batch_size": 64, "mean": 0.0, "std": 1.0}}


class Subject(NamedTuple):
    """A training that can be fitted. devices: as the Trainer takes them, always one. trainer: further settings of it."""

    model: ImageClassifier
    data: ImageData
    accelerator: str
    devices: Any
    precision: str
    trainer: dict[str, Any]

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of an epoch, at least one."""
        return max(1, len(self.data.split[0]) // self.data.batch_size)


def add_training_arguments(parser: argparse.ArgumentParser, recipe: str | None) -> None:
    """The flags that choose what is trained, and where, by their short and long names; `recipe` is the default."""
    parser.add_argument("--recipe", default=recipe, help="a packaged recipe, or a YAML file of your own")
    parser.add_argument("--net", "--model.net", help=f"another than the recipe's; {LINEAR!r} is a single layer")
    parser.add_argument("--lr", "--model.lr", type=float, help="another learning rate than the recipe's")
    parser.add_argument("--batch-size", "--data.batch_size", type=int, help="images a step; the recipe's if not given")
    parser.add_argument("--precision", "--trainer.precision", help="such as 32-true; this machine's best if not given")
    add_data_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser, dataset: str | None = None) -> None:
    """The flags that choose images and device."""
    parser.add_argument("--dataset", "--data.dataset", default=dataset, help="the recipe's, or shapes, if not given")
    parser.add_argument("--data-dir", "--data.root", dest="root", metavar="PATH", help="where archives are, or own images")
    parser.add_argument("--count", "--data.count", type=int, default=20_000, help="training images that `shapes` draws")
    parser.add_argument("--accelerator", "--trainer.accelerator", default="auto", help="auto, cpu, gpu or mps")
    parser.add_argument("--threads", type=int, help="of torch; as many as it takes if not given")


def subject_from(settings: argparse.Namespace) -> Subject:
    """The training that the flags of `add_training_arguments` choose; writes what they left open into `settings`.

    Model and data are as in the recipe, its rate and schedule too; of its Trainer only precision and logging interval
    are taken. Without a recipe: plain SGD on raw images.

    Raises:
        UsageError: names or settings that do not exist.
    """
    recipe: dict[str, Any] = recipe_settings(recipe_path(settings.recipe)) if settings.recipe else WITHOUT_RECIPE
    model, data, trainer = (dict(recipe.get(section) or {}) for section in ("model", "data", "trainer"))
    model |= {name: value for name in ("net", "lr") if (value := getattr(settings, name)) is not None}
    data |= {name: value for name in ("dataset", "root", "batch_size") if (value := getattr(settings, name)) is not None}
    if data.get("dataset") == "shapes":
        data["count"] = settings.count
    machine = detect_machine()
    accelerator, devices = choose_devices(machine, settings.accelerator, 1)
    precision = settings.precision or trainer.get("precision") or choose_precision(machine, accelerator)[0]
    images, classifier = build(model, data)
    settings.net, settings.lr = model.get("net", classifier.hparams["net"]), classifier.hparams["lr"]
    settings.dataset, settings.batch_size, settings.precision = images.dataset, images.batch_size, precision
    kept = {name: trainer[name] for name in ("log_every_n_steps",) if name in trainer}
    return Subject(classifier, images, accelerator, devices, precision, kept)


def build(model: dict[str, Any], data: dict[str, Any]) -> tuple[ImageData, ImageClassifier]:
    """Data and model from a recipe's sections; the net's weights are always the same."""
    try:
        images = ImageData(**{"seed": 0, **data})
        torch.manual_seed(0)
        shape = {"input_shape": images.input_shape, "num_classes": images.class_count}
        linear = model.get("net") == LINEAR
        classifier = ImageClassifier(**{**model, **shape, **({"net": "signs_mlp"} if linear else {})})
    except TypeError as error:  # a setting that neither of them has
        raise UsageError(f"this recipe cannot be measured: {error}") from None
    if linear:
        channels, height, width = images.input_shape
        classifier.net = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, images.class_count))
    return images, classifier


def fit(subject: Subject, *callbacks: Callback, max_epochs: int, validates: bool = False) -> str:
    """Fits with the bar, TensorBoard, metrics and checkpoints of a run, in a folder that is gone afterwards.

    Returns the precision that the Trainer computed in, which is not always the one that was asked for.
    """
    torch.set_float32_matmul_precision("high")  # as a run does
    with tempfile.TemporaryDirectory() as folder, _drawn_unseen():
        run = Run(RunFolder(Path(folder), "bench"), {"recipe": "bench"}, "", {}, "fit")
        trainer = pl.Trainer(
            accelerator=subject.accelerator,
            devices=subject.devices,
            precision=subject.precision,  # type: ignore[arg-type]
            max_epochs=max_epochs,
            callbacks=[*callbacks, *run.callbacks(validates=validates, bar=True)],
            logger=run.loggers(None),
            num_sanity_val_steps=0,
            limit_val_batches=1.0 if validates else 0,
            enable_model_summary=False,
            profiler=NoProfiler(),
            **subject.trainer,
        )
        try:
            trainer.fit(subject.model, datamodule=subject.data)
        finally:
            run.folder.release()
        return str(trainer.precision)


@contextmanager
def _drawn_unseen() -> Iterator[None]:
    """Lets everything be drawn as on a terminal, but where nobody sees it."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        rich.reconfigure(file=nowhere, force_terminal=True)
        try:
            yield
        finally:
            rich.reconfigure()


def read_clock(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


class Lap(NamedTuple):
    """Some steps of a training: how many, of how many images, in how many seconds."""

    steps: int
    images: int
    seconds: float


class Stopwatch(Callback):
    """Times laps of `steps` optimizer steps of a fit, after `warmup` steps; ends the fit after `count` laps.

    between: called, off the clock, with the lap that ended (None after the warm-up), while the training waits.
    """

    def __init__(self, warmup: int, steps: int, count: int, between: Callable[[Lap | None], None] = lambda lap: None) -> None:
        self._due, self._steps, self._count, self._between = warmup, steps, count, between
        self._images, self._started = 0, 0.0
        self._lap_started_at: int | None = None  # the global step; None during the warm-up
        self.laps: list[Lap] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a lap when its steps are done."""
        self._images += batch.labels.numel()
        step = trainer.global_step
        if step < self._due or trainer.should_stop:
            return
        lap = None
        if self._lap_started_at is not None:
            lap = Lap(step - self._lap_started_at, self._images, read_clock(pl_module.device) - self._started)
            self.laps.append(lap)
        self._between(lap)
        trainer.should_stop = len(self.laps) >= self._count
        self._lap_started_at, self._due, self._images = step, step + self._steps, 0
        self._started = read_clock(pl_module.device)
