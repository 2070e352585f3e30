"""Train a recipe under the Trainer with all features of a run, and time its steps against another loop."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import rich
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from progress import Progress
from script import set_threads
from torch import nn

from cifar_lit.base.config_file import plain_values
from cifar_lit.base.errors import UsageError
from cifar_lit.base.hardware import choose_devices, choose_precision, detect_machine
from cifar_lit.cli.flags import parse, recipe_path
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.loaders import count_batches
from cifar_lit.features import FEATURES, feature_class
from cifar_lit.run.folder import RunFolder
from cifar_lit.run.run import Run
from cifar_lit.training.callbacks import NoProfiler
from cifar_lit.training.classifier import ImageClassifier

LINEAR = "linear"  # a single layer, for measurements only
ENDLESS = 100_000  # epochs: the watch ends a fit
WITHOUT_RECIPE: dict[str, Any] = {
    "model": {"lr": 0.01},
    "data": {"dataset": "shapes", "batch_size": 64, "mean": 0.0, "std": 1.0},
}


class Subject(NamedTuple):
    """A training.

    trainer: the Trainer's arguments (accelerator, one device, precision).
    features: settings of each feature by its name.
    """

    model: ImageClassifier
    data: ImageData
    trainer: dict[str, Any]
    features: dict[str, dict[str, Any]]

    @property
    def bias_epochs(self) -> float | None:
        """Epochs over which the bias of a whitening layer is trained; None for all."""
        return (self.features.get("whitening") or {}).get("bias_epochs")


def add_training_arguments(parser: argparse.ArgumentParser, recipe: str | None) -> None:
    """Add the flags that select the training and its device; `recipe` is the default recipe.

    The measurement passes `settings.flags` to `subject_from`.
    """
    parser.set_defaults(flags=[])
    parser.epilog = "Further flags --model.NAME VALUE and --FEATURE.NAME VALUE change settings of the recipe."
    parser.add_argument("--recipe", default=recipe, help="a packaged recipe, or a YAML file of your own")
    parser.add_argument("--net", "--model.net", help=f"replaces the recipe's net; {LINEAR!r} is a single layer")
    parser.add_argument("--lr", "--model.lr", type=float, help="replaces the recipe's learning rate")
    parser.add_argument("--batch-size", "--data.batch_size", type=int, help="images per step; default: the recipe's")
    parser.add_argument(
        "--precision", "--trainer.precision", help="such as 32-true; default: the fastest of this machine"
    )
    add_data_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser, dataset: str | None = None) -> None:
    """Add the flags that select images and device."""
    parser.add_argument("--dataset", "--data.dataset", default=dataset, help="default: the recipe's, or shapes")
    parser.add_argument(
        "--data-dir", "--data.root", dest="root", metavar="PATH", help="folder of archives, or of your own images"
    )
    parser.add_argument("--count", "--data.count", type=int, default=20_000, help="training images of `shapes`")
    parser.add_argument("--accelerator", "--trainer.accelerator", default="auto", help="auto, cpu, gpu or mps")
    parser.add_argument("--threads", type=set_threads, help="torch's threads")


def model_settings(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--model.NAME VALUE` and of features by dotted name; raise UsageError for other flags."""
    values = {}
    for word in parse("train", list(flags)).flags:
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--")
        if name.partition(".")[0] not in ("model", *FEATURES) or not equals:
            raise UsageError(f"{word}: not a flag of this measurement (see --help), nor a setting of model or features")
        value = yaml.safe_load(text)
        with suppress(ValueError):  # YAML reads 1e-3 as text
            value = float(value) if isinstance(value, str) else value
        values[name.removeprefix("model.")] = value
    return values


def subject_from(settings: argparse.Namespace, flags: Sequence[str] = ()) -> Subject:
    """Return the training selected by the flags of `add_training_arguments`; write the values in use to `settings`.

    Model and data follow the recipe, including learning rate and schedule. Of its Trainer settings only precision and
    logging interval apply. Without a recipe: plain SGD on raw images. flags: see `model_settings`.

    Raises:
        UsageError: if a name or setting does not exist.
    """
    recipe: dict[str, Any] = plain_values(recipe_path(settings.recipe)) if settings.recipe else WITHOUT_RECIPE
    model, data, trainer = (dict(recipe.get(section) or {}) for section in ("model", "data", "trainer"))
    features = {name: dict(recipe[name]) for name in FEATURES if isinstance(recipe.get(name), dict)}
    for name in ("metrics", "monitor"):  # no validation runs
        model.pop(name, None)
    model |= {name: value for name in ("net", "lr") if (value := getattr(settings, name)) is not None}
    for name, value in model_settings(flags).items():
        option, _, key = name.partition(".")  # an option: net_options.depth
        target = features if option in FEATURES else model
        target[option] = {**(target.get(option) or {}), key: value} if key else value
    features = {name: values for name, values in features.items() if values is not None}
    data |= {
        name: value for name in ("dataset", "root", "batch_size") if (value := getattr(settings, name)) is not None
    }
    if data.get("dataset") == "shapes":
        data["count"] = settings.count
    machine = detect_machine()
    accelerator = settings.accelerator
    devices = choose_devices(machine, accelerator, 1)
    precision = settings.precision or trainer.get("precision") or choose_precision(machine, accelerator)[0]
    images, classifier = build(model, data)
    settings.net, settings.lr = model.get("net", classifier.hparams["net"]), classifier.hparams["lr"]
    settings.dataset, settings.batch_size, settings.precision = images.dataset, images.batch_size, precision
    extra = {name: trainer[name] for name in ("log_every_n_steps",) if name in trainer}
    arguments = {"accelerator": accelerator, "devices": devices, "precision": precision, **extra}
    return Subject(classifier, images, arguments, features)


def default_warmup(subject: Subject, least: int) -> int:
    """Return the steps of a warm-up: `least` after the whitening schedule, whose end changes the later steps."""
    epochs = math.ceil(subject.bias_epochs or 0)
    return epochs * count_batches(len(subject.data.split[0]), subject.data.batch_size) + least


def build(model: dict[str, Any], data: dict[str, Any]) -> tuple[ImageData, ImageClassifier]:
    """Return data and model from a recipe's sections; the weights are drawn from a fixed seed."""
    linear = model.get("net") == LINEAR
    try:
        images = ImageData(**{"seed": 0, **data})
        torch.manual_seed(0)
        shape = {"input_shape": images.input_shape, "num_classes": images.class_count}
        classifier = ImageClassifier(**{**model, **shape, **({"net": "signs_mlp"} if linear else {})})
    except TypeError as error:  # unknown setting
        raise UsageError(f"this recipe cannot be measured: {error}") from None
    if linear:
        channels, height, width = images.input_shape
        classifier.net = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, images.class_count))
    return images, classifier


def fit(subject: Subject, watch: Stopwatch, max_epochs: int = ENDLESS) -> str:
    """Fit until the watch has its rounds; return the Trainer's precision.

    As in a run, there are a bar, TensorBoard, metrics and checkpoints, in a temporary folder.
    """
    torch.set_float32_matmul_precision("high")  # same as in a run
    features = [feature_class(name)(**values) for name, values in subject.features.items()]
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w", encoding="utf-8") as devnull,
        redirect_stdout(devnull),
    ):
        run = Run(RunFolder(Path(folder), "bench"), {"recipe": "bench", "logger": "tensorboard"}, "", {}, "fit")
        trainer = pl.Trainer(
            **subject.trainer,
            max_epochs=max_epochs,
            callbacks=[watch, *features, *run.callbacks(validates=False)],
            logger=run.loggers(None),
            num_sanity_val_steps=0,
            limit_val_batches=0,
            enable_model_summary=False,
            profiler=NoProfiler(),
        )
        rich.reconfigure(file=devnull, force_terminal=True)  # draw the bar, but print nothing
        try:
            trainer.fit(subject.model, datamodule=subject.data)
        finally:
            rich.reconfigure()
            run.folder.release()
        return str(trainer.precision)


# ---- clocks


def read_clock(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


class Round(NamedTuple):
    """A turn of ours and of another loop: optimizer steps and training images of ours, seconds of each."""

    steps: int
    images: int
    ours: float
    other: float


# Starts the other loop before our first step; returns a function that gives it a turn, called with the steps of ours.
StartOther = Callable[[pl.Trainer, Any], Callable[[int], object]]


class Stopwatch(Callback):
    """Time rounds of a fit and of another loop in turn, after a warm-up; then end the fit.

    Args:
        steps: optimizer steps in a round.
        count: number of rounds.
        warmup: steps before the first round, at least 1.
        start_other: starts the other loop, which has a turn after the warm-up and after every round.
        progress: reports every round.
    """

    def __init__(
        self, steps: int, count: int, warmup: int, start_other: StartOther, progress: Progress | None = None
    ) -> None:
        self._steps, self._count, self._warmup, self._start_other = steps, count, warmup, start_other
        self._progress = progress
        self.rounds: list[Round] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the other loop before the first epoch, when model and data are in place."""
        if trainer.global_step == 0:
            self._make_turn = self._start_other(trainer, pl_module)
            self._warm = False
            self._begin_round(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a round after its steps."""
        self._images += batch.labels.numel()
        due = self._steps if self._warm else self._warmup
        if trainer.global_step - self._begun_at >= due:
            self._end_round(trainer, pl_module)
            trainer.should_stop = len(self.rounds) == self._count

    def _end_round(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Give the other loop its turn, and begin the next round."""
        paused = read_clock(model.device)
        steps = trainer.global_step - self._begun_at
        self._make_turn(steps)
        if self._warm:
            self.rounds.append(Round(steps, self._images, paused - self._begun, read_clock(model.device) - paused))
            if self._progress:
                self._progress.advance(len(self.rounds))
        self._warm = True
        self._begin_round(trainer, model)

    def _begin_round(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        self._images, self._begun_at, self._begun = 0, trainer.global_step, read_clock(model.device)
