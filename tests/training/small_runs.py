"""Trainings of a second or less in the test's own process, and what tests look at them with."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from cifar_lit.data.datamodule import ImageData
from cifar_lit.training.checkpoint import AtomicCheckpointIO, best_checkpoint, last_checkpoint
from cifar_lit.training.classifier import ImageClassifier
from cifar_lit.training.orderly_stop import OrderlyStop

BATCHES = 7  # of an epoch of `shapes_data`: six of 16 images and one of 4


class Rows(Logger):
    """Keeps what is logged, as (step, values)."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def of(self, name: str) -> dict[int, float]:
        """The values of one curve by step."""
        return {step: values[name] for step, values in self.rows if name in values}


class At(Callback):
    """Calls do(trainer, model) while the step of that number (from 1) runs, before its batch or after it."""

    def __init__(self, step: int, do: Callable[[pl.Trainer, Any], Any], after: bool = False) -> None:
        self._step, self._do, self._after = step, do, after

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._after and trainer.global_step + 1 == self._step:
            self._do(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._after and trainer.global_step == self._step:
            self._do(trainer, pl_module)


def stop_at(stop: OrderlyStop, step: int) -> At:
    """Asks for an orderly stop while a step is done."""
    return At(step, lambda *_: stop._receive(2, None))


# ---- data, model, Trainer


def shapes_data(**settings: Any) -> ImageData:
    """100 drawn images to train on, 20 to validate on and 24 to test on, in steps of 16 (the last of 4)."""
    defaults = {"count": 120, "image_size": 16, "val_size": 20, "batch_size": 16, "mean": 0.5, "std": 0.25}
    return ImageData("shapes", **{**defaults, **settings})


def broken_data(step: int, **settings: Any) -> ImageData:
    """The same, but that one image of the batch of that step (from 0, over all epochs) is NaN."""
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
    """A net whose weights show which random numbers were drawn, and whose buffers show which batches it saw."""
    features = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.4))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, num_classes))


def classifier(**settings: Any) -> ImageClassifier:
    """LeNet for those images; its weights are always the same."""
    torch.manual_seed(0)
    return ImageClassifier(**{"net": "lenet", "lr": 0.05, "input_shape": [3, 16, 16], "num_classes": 10, **settings})


def best_and_last(folder: Path) -> tuple[ModelCheckpoint, ModelCheckpoint]:
    """The callbacks of a run's checkpoints, which write to `folder`."""
    best, last = best_checkpoint(), last_checkpoint()
    best.dirpath = last.dirpath = str(folder)
    return best, last


def trainer(*callbacks: Callback, **settings: Any) -> pl.Trainer:
    """A quiet Trainer on one CPU process; it writes checkpoints where one of the callbacks does."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fixed = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    own = {
        "callbacks": list(callbacks),
        "plugins": [AtomicCheckpointIO()],
        "enable_checkpointing": saves,
        "max_epochs": 2,
    }
    return pl.Trainer(**{**quiet, **fixed, **own, **settings})


def fitted(
    model: pl.LightningModule, data: Any, *callbacks: Callback, resume: Path | None = None, **settings: Any
) -> pl.Trainer:
    """The Trainer after a fit of `model`, which goes on from the checkpoint `resume` if one is given."""
    done = trainer(*callbacks, **settings)
    done.fit(model, datamodule=data, ckpt_path=resume)
    return done


# ---- weights


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a net's state, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0.0, atol: float = 1e-6
) -> None:
    """Two states are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=atol, msg=name)
