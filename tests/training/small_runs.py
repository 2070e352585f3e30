"""Training runs of a second or less in the process of the test, with helpers to inspect them."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from grouped import grouped
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from cifar_lit.data.datamodule import ImageData
from cifar_lit.features import FEATURES, feature_class
from cifar_lit.models.registry import NETS
from cifar_lit.training.checkpoint import AtomicCheckpointIO, best_checkpoint, last_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.orderly_stop import OrderlyStop

MOMENTUM: dict[str, Any] = {"optimizer_options": {"momentum": 0.9}}
BATCHES = 7  # per epoch of `shapes_data`: six of 16 images and one of 4


class Rows(Logger):
    """Store the logged rows as (step, values)."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def curve(self, name: str) -> dict[int, float]:
        """Return the values of one curve by step."""
        return {step: values[name] for step, values in self.rows if name in values}


class At(Callback):
    """Call do(trainer, model) before or after the batch of the given step (from 1)."""

    def __init__(self, step: int, do: Callable[[pl.Trainer, Any], Any], after: bool = False) -> None:
        self._step, self._do, self._after = step, do, after

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._after and trainer.global_step + 1 == self._step:
            self._do(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._after and trainer.global_step == self._step:
            self._do(trainer, pl_module)


def stop_at(stop: OrderlyStop, step: int) -> At:
    """Request an orderly stop during a step."""
    return At(step, lambda *_: stop._receive(2, None))


# ---- data, model, Trainer


def shapes_data(**settings: Any) -> ImageData:
    """Return 100 generated training images, 20 validation and 24 test images, in batches of 16 (the last of 4)."""
    defaults = {"count": 120, "image_size": 16, "val_size": 20, "batch_size": 16, "mean": 0.5, "std": 0.25}
    return ImageData("shapes", **grouped({**defaults, **settings}))


def broken_data(step: int, **settings: Any) -> ImageData:
    """Return `shapes_data` with a NaN image in the batch of one step (from 0, over all epochs)."""
    data = shapes_data(**settings)
    prepared = data.on_after_batch_transfer

    def broken(batch: Any, dataloader_idx: int) -> Any:
        result = prepared(batch, dataloader_idx)
        loader: Any = data._train_loader
        if data.trainer.training and loader.epoch * len(loader) + loader.position - 1 == step:
            result.images[0] = math.nan
        return result

    data.on_after_batch_transfer = broken
    return data


def build_dropout(*, channels: int, image_size: tuple[int, int], num_classes: int, width: float) -> nn.Module:
    """Build a net whose weights depend on the random numbers, and whose buffers depend on the batches."""
    features = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.4))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, num_classes))


@pytest.fixture
def dropout_net(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register `build_dropout` as the net "dropout", for images of any size."""
    monkeypatch.setitem(NETS, "dropout", build_dropout)


def classifier(**settings: Any) -> ImageClassifier:
    """Return LeNet for the images of `shapes_data`, always with the same weights."""
    torch.manual_seed(0)
    return ImageClassifier(**{"net": "lenet", "lr": 0.05, "input_shape": [3, 16, 16], "num_classes": 10, **settings})


def features(settings: Mapping[str, Any]) -> list[Callback]:
    """Return the features in settings such as those of a recipe."""
    return [feature_class(name)(**settings[name]) for name in FEATURES if name in settings]


def best_and_last(folder: Path) -> tuple[ModelCheckpoint, ModelCheckpoint]:
    """Return the checkpoint callbacks of a run, which write to `folder`."""
    best, last = best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(folder)
    return best, last


def trainer(*callbacks: Callback, **settings: Any) -> pl.Trainer:
    """Return a quiet Trainer for one CPU process. It writes checkpoints only if one of the callbacks does."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fixed = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    checkpoints = {"plugins": [AtomicCheckpointIO()], "enable_checkpointing": saves}
    return pl.Trainer(**{**quiet, **fixed, **checkpoints, "callbacks": [*callbacks], "max_epochs": 2, **settings})


def float16(device: str = "cpu", **scaler: Any) -> dict[str, Any]:
    """Return the settings of a Trainer in 16-mixed, also for a CPU, where Lightning has no name for it."""
    precision = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, **scaler))
    return {"plugins": [AtomicCheckpointIO(), precision]}


def fitted(model: Any, data: Any, *callbacks: Callback, resume: Path | None = None, **settings: Any) -> pl.Trainer:
    """Fit `model`, from the checkpoint `resume` if given, and return the Trainer."""
    done = trainer(*callbacks, **settings)
    done.fit(model, datamodule=data, ckpt_path=resume)
    return done


# ---- weights


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a net's state on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Return whether two states are bit-equal."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


State = Mapping[str, Tensor]


def assert_close(actual: State, expected: State, rtol: float = 0.0, atol: float = 1e-6) -> None:
    """Assert that two states are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=atol, msg=name)
