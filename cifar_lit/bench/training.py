"""What several measurements train: a recipe under the Trainer with everything on that a run has on; and clocks."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stdout
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import rich
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from cifar_lit.bench.progress import Progress
from cifar_lit.cli.flags import recipe_path, recipe_settings
from cifar_lit.data.datamodule import ImageData
from cifar_lit.errors import UsageError
from cifar_lit.hardware import choose_devices, choose_precision, detect_machine
from cifar_lit.runs.run import Run
from cifar_lit.runs.run_folder import RunFolder
from cifar_lit.training.callbacks import NoProfiler
from cifar_lit.training.classifier import ImageClassifier

LINEAR = "linear"  # a net of a single layer, which only measurements know
SECONDS = 75.0  # that a measurement of steps takes where its line does not name their number: two minutes with all around it
TRIAL_STEPS, TRIAL_SECONDS = 8, 4.0  # what the number of steps is estimated from: so many, fewer where they take longer
MAX_STEPS, LEAST_ROUNDS = 100, 4
WITHOUT_RECIPE: dict[str, Any] = {"model": {"lr": 0.01}, "data": {"dataset": "shapes", "batch_size": 64, "mean": 0.0, "std": 1.0}}


class Subject(NamedTuple):
    """A training that can be fitted. trainer: the Trainer's accelerator, devices (always one), precision and others."""

    model: ImageClassifier
    data: ImageData
    trainer: dict[str, Any]


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


def subject_from(settings: argparse.Namespace, absent: Collection[str] = ()) -> Subject:
    """The training that the flags of `add_training_arguments` choose; writes what they left open into `settings`.

    Model and data are as in the recipe, its rate and schedule too; of its Trainer only precision and logging interval
    are taken. Without a recipe: plain SGD on raw images.

    Raises:
        UsageError: names or settings that do not exist, or a recipe that sets one of `absent`, which the loop that it is to be
            compared with does not have.
    """
    recipe: dict[str, Any] = recipe_settings(recipe_path(settings.recipe)) if settings.recipe else WITHOUT_RECIPE
    model, data, trainer = (dict(recipe.get(section) or {}) for section in ("model", "data", "trainer"))
    for name in ("metrics", "monitor"):  # what a validation counts
        model.pop(name, None)
    model |= {name: value for name in ("net", "lr") if (value := getattr(settings, name)) is not None}
    data |= {name: value for name in ("dataset", "root", "batch_size") if (value := getattr(settings, name)) is not None}
    defaults = {**signature(ImageClassifier).parameters, **signature(ImageData).parameters}
    for name, value in [*model.items(), *data.items()]:
        if name in absent and value != defaults[name].default:
            raise UsageError(f"the loop beside it does not know {name} {value!r}: name a --recipe without it, such as tudui")
    if data.get("dataset") == "shapes":
        data["count"] = settings.count
    machine = detect_machine()
    accelerator, devices = choose_devices(machine, settings.accelerator, 1)
    precision = settings.precision or trainer.get("precision") or choose_precision(machine, accelerator)[0]
    images, classifier = build(model, data)
    settings.net, settings.lr = model.get("net", classifier.hparams["net"]), classifier.hparams["lr"]
    settings.dataset, settings.batch_size, settings.precision = images.dataset, images.batch_size, precision
    kept = {name: trainer[name] for name in ("log_every_n_steps",) if name in trainer}
    return Subject(classifier, images, {"accelerator": accelerator, "devices": devices, "precision": precision, **kept})


def build(model: dict[str, Any], data: dict[str, Any]) -> tuple[ImageData, ImageClassifier]:
    """Data and model from a recipe's sections; the net's weights are always the same."""
    linear = model.get("net") == LINEAR
    try:
        images = ImageData(**{"seed": 0, **data})
        torch.manual_seed(0)
        shape = {"input_shape": images.input_shape, "num_classes": images.class_count}
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
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        run = Run(RunFolder(Path(folder), "bench"), {"recipe": "bench"}, "", {}, "fit")
        trainer = pl.Trainer(
            **subject.trainer,
            max_epochs=max_epochs,
            callbacks=[*callbacks, *run.callbacks(validates=validates, bar=True)],
            logger=run.loggers(None),
            num_sanity_val_steps=0,
            limit_val_batches=1.0 if validates else 0,
            enable_model_summary=False,
            profiler=NoProfiler(),
        )
        rich.reconfigure(file=nowhere, force_terminal=True)  # all is drawn as on a terminal, but where nobody sees it
        try:
            trainer.fit(subject.model, datamodule=subject.data)
        finally:
            rich.reconfigure()
            run.folder.release()
        return str(trainer.precision)


# ---- clocks


def read_clock(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


class Round(NamedTuple):
    """One turn of ours and of another loop: optimizer steps of each, training images of ours, seconds of either."""

    steps: int
    images: int
    ours: float
    other: float


# Starts the other loop, given ours before its first step; what it returns makes a turn, given the steps that ours made.
StartOther = Callable[[pl.Trainer, Any], Callable[[int], object]]


class Stopwatch(Callback):
    """Times rounds of a fit and of another loop, which take turns, after a warm-up off the clock; then it ends the fit.

    Args:
        steps: of the optimizer in a round; None for what takes `seconds` in all, as a trial of some steps says: at most MAX_STEPS
            in a round, and where the steps are slow fewer rounds, down to LEAST_ROUNDS.
        count: of rounds.
        warmup: steps before the first of them.
        start_other: for another loop, which has its turn after the warm-up and after every round, while the training waits.
        progress: says how long all takes; nothing is said if not given.
    """

    def __init__(
        self,
        steps: int | None,
        count: int,
        warmup: int,
        start_other: StartOther = lambda trainer, model: lambda steps: None,
        *,
        seconds: float = SECONDS,
        progress: Progress | None = None,
    ) -> None:
        self.steps, self._count, self._warmup, self._start_other = steps, count, warmup, start_other
        self._seconds, self._progress = seconds, progress
        self.rounds: list[Round] = []

    def _lengths(self) -> Iterator[int]:
        """The steps of each round: to warm up, for the trial if there is one, and of those that count."""
        yield self._warmup
        if self.steps is None:
            yield max(1, min(TRIAL_STEPS, int(TRIAL_SECONDS / self._per_step())))
        per_step = self._per_step()
        self.rounds.clear()
        if self.steps is None:
            self._count = min(self._count, max(LEAST_ROUNDS, int(self._seconds / per_step)))
            self.steps = max(1, min(MAX_STEPS, int(self._seconds / (per_step * self._count))))
        if self._progress:
            self._progress.total = self._count
            self._progress.announce(
                per_step * self.steps * self._count, f"{self._count} rounds of {self.steps} step{'s' * (self.steps > 1)}"
            )
        for number in range(self._count):
            yield self.steps
            if self._progress:
                self._progress.advance(number + 1)

    def _per_step(self) -> float:
        """Seconds of a step of both in the last round."""
        last = self.rounds[-1]
        return (last.ours + last.other) / last.steps

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the other loop before the first epoch; by now everything is where and as the training begins."""
        if trainer.global_step == 0:
            self._make_turn = self._start_other(trainer, pl_module)
            self._plan = self._lengths()
            self._length = next(self._plan)
            self._begin_round(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a round when its steps are done."""
        self._images += batch.labels.numel()
        if trainer.global_step - self._begun_at >= self._length:
            self.end_round(trainer, pl_module)
            self._length = next(self._plan, sys.maxsize)
            trainer.should_stop = self._length == sys.maxsize

    def end_round(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Has the other loop make its turn, and begins the next round."""
        paused = read_clock(model.device)
        steps = trainer.global_step - self._begun_at
        self._make_turn(steps)
        self.rounds.append(Round(steps, self._images, paused - self._begun, read_clock(model.device) - paused))
        self._begin_round(trainer, model)

    def _begin_round(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        self._images, self._begun_at, self._begun = 0, trainer.global_step, read_clock(model.device)


class EpochStopwatch(Stopwatch):
    """The same by whole epochs of ours, each with its validation and all that the Trainer does at its end."""

    def __init__(self, start_other: StartOther, progress: Progress | None = None) -> None:
        super().__init__(sys.maxsize, 0, sys.maxsize, start_other, progress=progress)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts images; after some steps says how long an epoch of ours takes."""
        self._images += batch.labels.numel()
        if self._progress and trainer.global_step == TRIAL_STEPS:
            epoch = (read_clock(pl_module.device) - self._begun) / TRIAL_STEPS * trainer.num_training_batches
            each = f"{trainer.max_epochs} epochs of ours; the other loop's come on top, how long shows after its first"
            self._progress.announce(epoch * (trainer.max_epochs or 1), each)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the epoch before, if there was one."""
        super().on_train_epoch_start(trainer, pl_module)
        if trainer.current_epoch:
            self.end_round(trainer, pl_module)
            if self._progress:
                self._progress.advance(trainer.current_epoch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the last epoch."""
        self.end_round(trainer, pl_module)
