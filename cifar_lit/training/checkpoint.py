"""Write checkpoints atomically; read them without executing code in them."""

from __future__ import annotations

import pickle
import re
import time
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from cifar_lit.base.errors import Failure, UsageError, first_line
from cifar_lit.base.files import atomic_write, write_failure
from cifar_lit.base.text import duration_seconds
from cifar_lit.training.loop import is_last_epoch, validates_next, within_epoch

if TYPE_CHECKING:
    from cifar_lit.training.classifier import ImageClassifier

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


class DamagedCheckpoint(Failure):
    """A checkpoint file is damaged; an earlier checkpoint may replace it."""


# ---- writing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint under a temporary name in its folder, sync it to disk and rename it.

    A `last.ckpt` that is replaced becomes `previous.ckpt`. Lightning writes to $TMPDIR and copies the file; a kill can
    truncate that copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folders: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        """Write `checkpoint` to `path`. Raise Failure, with the old file intact, if the write fails."""
        target = Path(path)
        previous = target.with_name(PREVIOUS) if target.name == LAST else None
        try:
            if target.parent not in self._folders:  # Create a folder only once, not again after it was deleted.
                target.parent.mkdir(parents=True, exist_ok=True)
                self._folders.add(target.parent)
            with atomic_write(target, previous) as partial, partial.open("wb") as file:
                torch.save(checkpoint, file)
        except OSError as error:
            resumable = any(target.with_name(name).is_file() for name in (LAST, PREVIOUS, BEST))
            raise write_failure(target, error, resumable) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> object:
        """Return the contents of a checkpoint; see `read_checkpoint`."""
        return read_checkpoint(Path(path))


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that saves only at the end of epochs, and whose run folder may be moved."""

    @cached_property
    def state_key(self) -> str:
        """Lightning's key, cached: Lightning reads it about six times a step."""
        return super().state_key

    on_train_batch_end = Callback.on_train_batch_end

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: ImageClassifier, checkpoint: dict[str, Any]) -> None:
        """Replace the folder in the state of every ModelCheckpoint: Lightning deletes the files that a state names."""
        states = checkpoint.get("callbacks", {})
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                states[callback.state_key] = _in_folder(states[callback.state_key], str(callback.dirpath))

    def save_first(self, trainer: pl.Trainer, scores: Mapping[str, float]) -> None:
        """Save the weights before the first step as the best so far. scores: validation scores by name."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            tensors = {name: torch.tensor(score) for name, score in scores.items()}
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer) | tensors)


def _in_folder(state: Mapping[str, Any], folder: str) -> dict[str, object]:
    """Return a ModelCheckpoint's state with all paths moved to `folder`."""

    def moved(path: str) -> str:
        return f"{folder}/{Path(path).name}" if path else path

    paths = {name: moved(state.get(name, "")) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    best = {moved(path): score for path, score in state.get("best_k_models", {}).items()}
    return {**state, **paths, "best_k_models": best, "dirpath": folder}


class RegularCheckpoint(RunCheckpoint):
    """Write `last.ckpt` within epochs, only after optimizer steps, because accumulated gradients are not saved."""

    state_key = "RegularCheckpoint"  # without the interval, which may change on resume

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: ImageClassifier, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Save if due, unless a validation follows this step."""
        if within_epoch(trainer) and not validates_next(trainer):
            ModelCheckpoint.on_train_batch_end(self, trainer, pl_module, None, None, 0)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: ImageClassifier) -> None:
        """Save if due after a validation within an epoch."""
        if within_epoch(trainer):
            ModelCheckpoint.on_train_batch_end(self, trainer, pl_module, None, None, 0)


class LastCheckpoint(RunCheckpoint):
    """Write `last.ckpt` at the end of the training, and at the end of an epoch if MIN_INTERVAL has passed.

    A write takes about 60 ms on two busy cores; an epoch on a large GPU may be as short. Several processes write at the
    end of every epoch, because their clocks differ.
    """

    MIN_INTERVAL = 5.0  # seconds

    requested = False  # set to save at the end of an epoch regardless of MIN_INTERVAL

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if due."""
        seconds = time.monotonic() - (self._last_time_checked or 0.0)
        is_due = self.requested or trainer.world_size > 1 or seconds >= self.MIN_INTERVAL
        if is_due or is_last_epoch(trainer):
            super().on_train_epoch_end(trainer, pl_module)
            self._last_time_checked = time.monotonic()

    def is_current(self, trainer: pl.Trainer) -> bool:
        """Return whether the last checkpoint is from the current step."""
        return self._last_global_step_saved == trainer.global_step


def best_checkpoint(monitor: str = "val/accuracy", mode: str = "max") -> RunCheckpoint:
    """Return a callback that keeps `best.ckpt`, with the highest (`max`) or lowest (`min`) value of `monitor`."""
    return RunCheckpoint(filename="best", monitor=monitor, mode=mode, save_top_k=1, enable_version_counter=False)


def last_checkpoint() -> LastCheckpoint:
    """Return a callback that keeps `last.ckpt`."""
    return LastCheckpoint(filename="last", every_n_epochs=1, save_on_train_epoch_end=True, enable_version_counter=False)


def regular_checkpoint(interval: str | int) -> RegularCheckpoint:
    """Return a callback that writes `last.ckpt` every `500` steps, or every `10m`, `90s` or `1.5h`.

    Raises UsageError for an invalid interval.
    """
    seconds = duration_seconds(str(interval))
    if seconds:
        triggers: dict[str, Any] = {"train_time_interval": timedelta(seconds=seconds)}
    elif re.fullmatch(r"0*[1-9]\d*", str(interval)):
        triggers = {"every_n_train_steps": int(interval)}
    else:
        valid = "a number of steps (500) or a time (10m, 90s, 1h)"
        raise UsageError(f"--checkpoint-every must be {valid}, not {interval}")
    return RegularCheckpoint(filename="last", enable_version_counter=False, save_on_train_epoch_end=False, **triggers)


# ---- reading


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, with tensors on the CPU. No code in it is executed.

    Raises:
        UsageError: if it is missing, a folder or a model file.
        DamagedCheckpoint: if the file is truncated or damaged.
        Failure: if it is not a checkpoint, or would execute code.
    """
    contents = _read(path)
    if not isinstance(contents.get("state_dict"), Mapping):
        raise Failure(f"{path} is not a Lightning checkpoint: it has no state_dict. Use another checkpoint.")
    return contents


# Names under which programs store the weights of a net beside other values, the preferred one first.
CONTAINERS = (
    "state_dict", "model", "model_state_dict", "net", "network", "module", "weights", "params",
    "state_dict_ema", "ema_state_dict", "model_ema", "ema", "teacher", "student",
)  # fmt: skip


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a checkpoint of any program by name, on the CPU.

    Tensors in one of CONTAINERS, at any depth, take precedence. Raises the errors of `read_checkpoint`.
    """
    with torch.serialization.safe_globals([Namespace]):  # timm's `args`; building one runs no code
        contents = _read(path)
    weights: Mapping[str, object] | None = contents
    while weights is not None:
        contents = dict(weights)
        weights = next((contents[name] for name in CONTAINERS if isinstance(contents.get(name), Mapping)), None)
    tensors = {str(name): tensor for name, tensor in contents.items() if isinstance(tensor, Tensor)}
    if not tensors:
        raise Failure(f"{path} holds no weights: name a file with the state_dict of a net")
    return tensors


def check_checkpoint_path(path: Path) -> None:
    """Raise UsageError for a missing file, a run folder or a model file; the message names the checkpoint to use."""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    if path.is_dir() or path.suffix == ".safetensors":
        best = (path if path.is_dir() else path.parent) / "checkpoints" / BEST
        kind = "a folder" if path.is_dir() else "no checkpoint, but holds weights only"
        raise UsageError(f"{path} is {kind}: name a checkpoint" + (f", {best}" if best.is_file() else " of a run"))


def _read(path: Path) -> dict[str, Any]:
    """Return the dict in a file of torch.save; see `read_checkpoint`."""
    check_checkpoint_path(path)
    try:
        if zipfile.is_zipfile(path):  # torch verifies no checksum
            with zipfile.ZipFile(path) as container:
                if container.testzip() is not None:
                    raise ValueError("its checksum does not match")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old formats
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not any(word in str(error) for word in ("GLOBAL", "Trying to call reduce", "allowlisted")):
            raise DamagedCheckpoint(f"{path} is not a checkpoint, or is damaged: use another checkpoint") from None
        remedy = "Use checkpoints that hold weights only, as torch.save(net.state_dict(), FILE) writes"
        raise Failure(f"{path} was not loaded: it would execute code. {remedy}.") from None
    except Exception as error:  # A damaged file can raise anything.
        fault = f"{path} is cut short or damaged ({first_line(error)})"
        raise DamagedCheckpoint(f"{fault}: use another checkpoint") from None
    if not isinstance(contents, dict):
        raise Failure(f"{path} holds a {type(contents).__name__}, no checkpoint and no state dict: use another file")
    return contents


class ValidCheckpoint(NamedTuple):
    """A checkpoint to resume from. damaged: path and fault of the damaged checkpoint that it replaces, or None."""

    path: Path
    contents: dict[str, object]
    damaged: str | None


def latest_valid_checkpoint(path: Path) -> ValidCheckpoint:
    """Return the checkpoint `path` of a run or, if it is damaged, the most advanced valid one in its folder.

    Raises the errors of `read_checkpoint` if there is none, or if any checkpoint would execute code.
    """
    try:
        return ValidCheckpoint(path, read_checkpoint(path), None)
    except DamagedCheckpoint as error:
        others = []
        for other in (path.with_name(name) for name in (PREVIOUS, BEST, LAST)):
            with suppress(DamagedCheckpoint):
                if other.is_file():
                    others.append((other, read_checkpoint(other)))
        if not others:
            raise
        other, contents = max(others, key=lambda each: each[1].get("global_step", 0))
        return ValidCheckpoint(other, contents, str(error).rpartition(": ")[0])


def describe_net(settings: Mapping[str, Any]) -> str:
    """Return the name and the shapes of a net from the hyper-parameters of its model."""
    shape = "×".join(map(str, settings.get("input_shape", "?")))
    width = settings.get("width", 1.0)
    net = settings.get("net", "an unknown net")
    if width != 1.0:
        net += f" width {width}"
    return f"{net} ({shape}, {settings.get('num_classes', '?')} classes)"


def load_weights(model: pl.LightningModule, path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Load the weights of a checkpoint that was read from `path`. Raise Failure for another net."""
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except RuntimeError:
        saved = describe_net(checkpoint.get("hyper_parameters", {}))
        remedy = "leave out --net and the data flags, or use those of the checkpoint"
        raise Failure(f"{path} holds weights of {saved}, not of {describe_net(model.hparams)}: {remedy}") from None
