"""Test accuracy over the seconds of a fit, measured with the fit's clock stopped and nothing in the fit changed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from cifar_lit.training.callbacks import Clock, WeightAverage
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.metrics import Evaluation


class Point(NamedTuple):
    """The accuracy (a fraction) on all test images after some optimizer steps, which took `seconds` of the fit."""

    step: int
    seconds: float
    accuracy: float


class AccuracyCurve(Checkpoint):
    """Tests the net at the end of each epoch, and every so many steps if wanted; without test-time views.

    Nothing may be chosen by what it sees: these are the test images. It is a `Checkpoint` so that the Trainer calls it
    after the callback that averages the weights, whose average of this step is what is tested.

    clock: of the fit; it stands still meanwhile. every: optimizer steps between tests, 0 for epoch ends only. Where a
    training step makes several optimizer steps, the test comes after the one that reaches the number.

    points: what was found. spent: seconds that the tests took.
    """

    @property
    def takes_chunks(self) -> bool:
        """Whether it does not count steps."""
        return self._every == 0

    def __init__(self, clock: Clock, every: int = 0) -> None:
        self._clock, self._every = clock, every
        self._loader: Any = None
        self.points: list[Point] = []
        self.spent = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tests if the steps are reached."""
        before = self.points[-1].step if self.points else 0
        if self._every and trainer.global_step // self._every > before // self._every:
            self._test(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tests, if the last step has not been tested already."""
        if not self.points or self.points[-1].step < trainer.global_step:
            self._test(trainer, pl_module)

    def _test(self, trainer: pl.Trainer, pl_module: Any) -> None:
        wait = torch.get_device_module(pl_module.device).synchronize
        wait()
        started = time.perf_counter()
        with self._clock.paused():
            if self._loader is None:
                self._loader = trainer.datamodule.test_dataloader()  # type: ignore[attr-defined]
            with undisturbed(trainer, pl_module):
                accuracy = accuracy_of(trainer, pl_module, self._loader)
            self.points.append(Point(trainer.global_step, self._clock.seconds, accuracy))
            wait()
        self.spent += time.perf_counter() - started


@contextmanager
def undisturbed(trainer: pl.Trainer, model: ImageClassifier) -> Iterator[None]:
    """For a look at the net amid a fit: the averaged weights in evaluation mode, everything put back afterwards.

    Evaluation draws no numbers on the device; workers that load images draw from the CPU's generator, which is
    restored too.
    """
    averages = [callback for callback in trainer.callbacks if isinstance(callback, WeightAverage)]  # type: ignore[attr-defined]
    training = [module for module in model.modules() if module.training]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for average in averages:
            average.on_validation_epoch_start(trainer, model)
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
            for average in averages:
                average.on_validation_epoch_end(trainer, model)


def accuracy_of(trainer: pl.Trainer, model: ImageClassifier, loader: Any) -> float:
    """The fraction of a loader's images that the net classifies rightly, in the precision of the Trainer."""
    evaluation = Evaluation(model.hparams["num_classes"]).to(model.device)
    for batch in loader:
        here = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.test_step_context():
            logits = model(here.images)
        evaluation.update(logits, here.labels)
    return evaluation.compute().accuracy


def first_pass(points: Sequence[Sequence[float]], threshold: float) -> float | None:
    """Seconds of the first point (step, seconds, accuracy) at or above an accuracy; None if none is."""
    return next((seconds for _, seconds, accuracy in points if accuracy >= threshold), None)
