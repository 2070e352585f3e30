"""Checkpoints that are whole or absent, and that are refused in one line when they cannot be used.

A checkpoint may come from anywhere, and disks and copies damage files. `torch.load(weights_only=True)` keeps code from running,
but verifies nothing, and does not keep a small file from asking for much: a zip entry may unpack to gigabytes, a tensor of one
number may stand for 10¹² by its strides, a list that holds itself twice, thirty times over, for 10⁹ values.
"""

from __future__ import annotations

import pickle
import re
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cifar_lit.errors import Failure, InvalidFileError, UsageError, first_line
from cifar_lit.files import atomic_write, file_size, write_failure
from cifar_lit.training.checkpoint_pickle import check_pickles

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"

MAX_ENTRIES = (
    10_000  # of the zip file; one a tensor: a large net with Adam's state and an average of the weights has 7,000
)
MAX_VALUES = 10_000_000  # with shared ones written out
MAX_DEPTH = 50  # levels of lists and dicts
MAX_COUNTERS = 10_000  # values that say how far a training is; Lightning's are about 150
FOLDER_ATTRIBUTE = 0x10  # of a zip file's part: torch reads nothing into the tensor of such a one, and says nothing


class DamagedCheckpoint(Failure):
    """A checkpoint is not as it was written, so that an earlier one may take its place."""


# ---- writing


def within_epoch(trainer: pl.Trainer) -> bool:
    """Whether an epoch goes on after this batch, with no gradients that wait for further ones: no checkpoint would hold them."""
    return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not trainer.fit_loop._should_accumulate()


def validates_next(trainer: pl.Trainer) -> bool:
    """Whether a validation is due right after this batch: a checkpoint of before it would lose it. All devices say the same."""
    loop: Any = trainer.fit_loop
    return loop.trainer._val_check_time_interval is None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, syncs it to disk, then renames it; a `last.ckpt` that it replaces is `previous.ckpt`.

    Lightning's own goes through $TMPDIR and a copy, which a kill can cut short on another file system.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folders: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`. Raise Failure, with the old file intact, if the disk does not take it."""
        target = Path(path)
        previous = target.with_name(PREVIOUS) if target.name == LAST else None
        try:
            if (
                target.parent not in self._folders
            ):  # once: a folder that is gone is not made anew, without what was in it
                target.parent.mkdir(parents=True, exist_ok=True)
                self._folders.add(target.parent)
            with atomic_write(target, previous) as partial, partial.open("wb") as file:
                torch.save(checkpoint, file)
        except OSError as error:
            resumable = any(target.with_name(name).is_file() for name in (LAST, PREVIOUS, BEST))
            raise write_failure(target, error, resumable) from error

    def load_checkpoint(self, path: Any, map_location: Callable | None = None, weights_only: bool | None = None) -> Any:
        """Reads plain values and tensors only; raises Failure for a file that is damaged or would execute code."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint; never a folder, nor what no checkpoint is called."""
        file = Path(path)
        if file.suffix == ModelCheckpoint.FILE_EXTENSION and not file.is_dir():
            file.unlink(missing_ok=True)


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that saves at the ends of epochs only, and knows its best checkpoint after its folder was moved."""

    @cached_property
    def state_key(self) -> str:
        """Lightning's own, of settings that never change: it asks for it some six times a step."""
        return super().state_key

    on_train_batch_end = Callback.on_train_batch_end

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Brings the state of every ModelCheckpoint into its folder of today: a run moves, and what it names may be deleted."""
        states = checkpoint.get("callbacks", {})
        for callback in (callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)):
            for key in {
                callback.state_key,
                type(callback),
            } & states.keys():  # Lightning's own, and that of its old versions
                states[key] = _in_folder(states[key], str(callback.dirpath))

    def save_first(self, trainer: pl.Trainer, scores: Mapping[str, float]) -> None:
        """Saves weights that are there before the first step, with their scores by name: the best so far."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        candidates = {
            **self._monitor_candidates(trainer),
            **{name: torch.tensor(score) for name, score in scores.items()},
        }
        self._save_topk_checkpoint(trainer, candidates)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state."""
        super().load_state_dict(state_dict)
        self.current_score = state_dict.get("current_score")  # which Lightning saves, and leaves out here


def _in_folder(state: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A ModelCheckpoint's state in which every path is that of a file in `folder`."""

    def moved(path: str) -> str:
        return f"{folder}/{Path(path).name}" if path else path

    paths = {name: moved(state.get(name, "")) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    best = {moved(path): score for path, score in state.get("best_k_models", {}).items()}
    if not all(isinstance(score, Tensor) for score in best.values()) or paths["kth_best_model_path"] not in {"", *best}:
        raise ValueError("its best checkpoints have no scores")
    return {**state, **paths, "best_k_models": best, "dirpath": folder}


class RegularCheckpoint(RunCheckpoint):
    """Writes `last.ckpt` within epochs, between updates: gradients that wait for further batches would be lost."""

    state_key = "RegularCheckpoint"  # without the interval, which may change when a run is resumed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Has the ends of epochs saved too, however short these are."""
        super().on_train_start(trainer, pl_module)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LastCheckpoint):
                callback.asked_for = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves every so many steps or minutes, as Lightning does; where a validation is due, after it. Epochs' ends save too."""
        if not within_epoch(trainer):
            return
        if validates_next(trainer):
            every, interval, now = self._every_n_train_steps, self._train_time_interval, time.monotonic()
            due = every > 0 and trainer.global_step % every == 0
            if interval is not None:  # the first device's clock counts for all
                due = trainer.strategy.broadcast(now - (self._last_time_checked or now) >= interval.total_seconds())
                self._last_time_checked = now if due else self._last_time_checked
            self._defer_save_until_validation = due
        else:
            ModelCheckpoint.on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)


class LastCheckpoint(RunCheckpoint):
    """Writes `last.ckpt` at the end of the training, and at an epoch's if the one before was long enough ago.

    One takes about 60 ms on two busy cores, and an epoch on a big GPU may take little more. Several processes, which would have
    to agree, write at the end of each epoch.
    """

    MIN_INTERVAL = 5.0  # seconds, of which a write is about a hundredth

    asked_for = False  # by a signal to stop at the end of this epoch, or by a setting at the end of each

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves if it is time for it."""
        last = (
            trainer.should_stop
            or trainer.current_epoch + 1 == trainer.max_epochs
            or trainer.global_step == trainer.max_steps
        )
        waited = time.monotonic() - (self._last_time_checked or 0.0)
        if last or self.asked_for or trainer.world_size > 1 or waited >= self.MIN_INTERVAL:
            super().on_train_epoch_end(trainer, pl_module)
            self._last_time_checked = time.monotonic()

    def is_of(self, trainer: pl.Trainer) -> bool:
        """Whether the last one that was written is of this moment."""
        return self._last_global_step_saved == trainer.global_step


def best_checkpoint(monitor: str = "val/accuracy", mode: str = "max") -> RunCheckpoint:
    """Keeps the checkpoint of the epoch with the highest (`max`) or lowest (`min`) figure of the validation as `best.ckpt`."""
    return RunCheckpoint(filename="best", monitor=monitor, mode=mode, save_top_k=1, enable_version_counter=False)


def last_checkpoint() -> LastCheckpoint:
    """Keeps the checkpoint of one of the last epochs that ended as `last.ckpt`, and in the end that of the last."""
    return LastCheckpoint(filename="last", every_n_epochs=1, save_on_train_epoch_end=True, enable_version_counter=False)


def regular_checkpoint(interval: str | int) -> RegularCheckpoint:
    """Keeps `last.ckpt` fresh within epochs: every `500` steps, or every `10m`, `90s` or `1.5h`; raises UsageError for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(interval))
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    triggers: dict[str, Any] = {"every_n_train_steps": int(number)}
    if unit:
        triggers = {"train_time_interval": timedelta(seconds=number * {"s": 1, "m": 60, "h": 3600}[unit])}
    if number == 0 or (not unit and number != int(number)):
        raise UsageError(f"--checkpoint-every is a number of steps (500) or a time (10m, 90s, 1h), not {interval}")
    return RegularCheckpoint(filename="last", enable_version_counter=False, save_on_train_epoch_end=False, **triggers)


# ---- reading


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, on the CPU; no code in it is executed.

    Raises DamagedCheckpoint if it is cut short, or not as it was written, Failure if it is no checkpoint or would execute code,
    and what `check_checkpoint_path` raises.
    """
    return _read(path, _check_contents)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, of a checkpoint of any program that holds nothing else; no code in it is executed.

    Those of `state_dict` or `model` where there is one. Raises what `read_checkpoint` does.
    """
    contents = _read(path, lambda contents: _count_values(contents, {}, 0))
    weights = next(
        (contents[name] for name in ("state_dict", "model") if isinstance(contents.get(name), Mapping)), contents
    )
    tensors = {str(name): tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    if not tensors:
        raise Failure(f"{path} holds no weights: name a file of a net's state_dict")
    return tensors


def check_checkpoint_path(path: Path) -> None:
    """Raise UsageError if there is no such file, or a run folder or a model, with the checkpoint to name instead."""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    if path.is_dir() or path.suffix == ".safetensors":
        best = (path if path.is_dir() else path.parent) / "checkpoints" / BEST
        kind = "a folder" if path.is_dir() else "no checkpoint, but holds weights alone"
        raise UsageError(f"{path} is {kind}: name a checkpoint" + (f", {best}" if best.is_file() else " of a run"))


def _read(path: Path, check: Callable[[Mapping[str, Any]], object]) -> dict[str, Any]:
    """Return the mapping in a file of torch.save. check: raises InvalidFileError or Failure for contents that are refused."""
    check_checkpoint_path(path)
    try:
        _check_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about old and foreign formats: it is the contents that decide
            contents = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(contents, dict):
            raise Failure(f"{path} is no Lightning checkpoint, nor weights by name")
        check(contents)
    except Failure:
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror or error}): use another checkpoint") from None
    except InvalidFileError as error:
        raise Failure(f"{path} was not loaded: {error}. Use another checkpoint.") from None
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in ("GLOBAL", "Trying to call reduce", "allowlisted")):
            raise Failure(
                f"{path} was not loaded: it would execute code. Use checkpoints that hold weights only."
            ) from None
        raise DamagedCheckpoint(f"{path} is no checkpoint, or is damaged: use another one") from None
    except Exception as error:  # a damaged file raises whatever its garbage leads to
        raise DamagedCheckpoint(
            f"{path} is cut short or damaged ({first_line(error)}): use another checkpoint"
        ) from None
    return contents


class ValidCheckpoint(NamedTuple):
    """The checkpoint that a run goes on from. damaged: the newer one that it stands in for, and what is wrong with that."""

    path: Path
    contents: dict[str, Any]
    damaged: str | None


def latest_valid_checkpoint(path: Path) -> ValidCheckpoint:
    """The checkpoint `path` of a run or, where it is damaged, the furthest whole one of those beside it.

    Raises what `read_checkpoint` does when none is whole, or one would execute code: its folder is not to be trusted.
    """
    try:
        return ValidCheckpoint(path, read_checkpoint(path), None)
    except DamagedCheckpoint as error:
        others = []
        for other in (path.with_name(name) for name in (PREVIOUS, BEST, LAST)):
            with suppress(DamagedCheckpoint):
                if other != path and other.is_file():
                    others.append((other, read_checkpoint(other)))
        if not others:
            raise
        other, contents = max(others, key=lambda each: each[1].get("global_step", 0))
        return ValidCheckpoint(other, contents, str(error).rpartition(": ")[0])


def _check_file(path: Path) -> None:
    """Check a file of torch.save before torch.load reads it: the CRC of each part of the zip file, then the pickle.

    Raises ValueError if a checksum differs, whatever zipfile raises if the end is missing, and InvalidFileError if the file
    claims more than it holds. torch.save does not compress, so compressed parts are refused: they would grow.
    """
    size = file_size(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"PK\3\4":
        check_pickles(path, None)
        return
    with zipfile.ZipFile(path) as container:
        entries = container.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise InvalidFileError("its parts are packed, which a checkpoint's are not")
        if len(entries) > MAX_ENTRIES or sum(entry.file_size for entry in entries) > size:
            raise InvalidFileError("it claims to hold more than it does")
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise InvalidFileError("two of its parts have the same name")
        if container.testzip() is not None:
            raise ValueError("its checksum does not match")
        if any(entry.external_attr & FOLDER_ATTRIBUTE for entry in entries):
            raise ValueError("a part of it is marked as a folder")
        check_pickles(path, container)


def _check_contents(checkpoint: Mapping[str, Any]) -> None:
    """Raises InvalidFileError for weights that are none, endless nesting or sharing, and tensors without memory."""
    if "state_dict" not in checkpoint:
        raise InvalidFileError("it is no Lightning checkpoint, as it holds no state_dict")
    weights = checkpoint["state_dict"]
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise InvalidFileError("its state_dict is not made of tensors by name")
    for name in ("epoch", "global_step"):
        if type(checkpoint.get(name, 0)) is not int or not 0 <= checkpoint.get(name, 0) < 2**53:
            raise InvalidFileError(f"its {name} is not a number of steps or epochs")
    for name in ("hyper_parameters", "loops", "callbacks", "cifar_lit"):
        if not isinstance(checkpoint.get(name, {}), Mapping):
            raise InvalidFileError(f"its {name} are not settings by name")
    if not str(checkpoint.get("pytorch-lightning_version", "")).isprintable():  # Lightning prints it as it is
        raise InvalidFileError("its version of Lightning is not a version")
    _count_values(checkpoint, {}, 0)
    loops = checkpoint.get("loops", {})
    if _count_values(loops, {}, 0) > MAX_COUNTERS or not all(
        type(value) in (int, bool) for value in tree_leaves(loops)
    ):
        raise InvalidFileError("its loops are not counted in whole numbers")


def _count_values(value: Any, known: dict[int, int], depth: int) -> int:
    """The values in a nested value, shared ones as often as they are met."""
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 1
    if depth > MAX_DEPTH or known.get(id(value)) == 0:
        raise InvalidFileError("its values are nested without end")
    if id(value) not in known:
        known[id(value)] = 0  # until it is counted: to meet it again means a loop
        inner = [one for pair in value.items() for one in pair] if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_count_values(one, known, depth + 1) for one in inner)
    if known[id(value)] > MAX_VALUES:
        raise InvalidFileError(f"its values are shared so often that they are more than {MAX_VALUES:,}")
    return known[id(value)]


def describe_net(settings: Any) -> str:
    """The net of a checkpoint's settings by name, with the shapes that its weights depend on."""
    sides = settings.get("input_shape")  # a checkpoint's settings may be anything
    shape = "×".join(str(side)[:9] for side in sides[:3]) if isinstance(sides, list | tuple) else "of unknown shape"
    factor = settings.get("width", 1.0)
    known = isinstance(factor, int | float)
    width = " of unknown width" if not known else "" if factor == 1.0 else f" width {factor:g}"
    net, classes = (str(settings.get(name, "?"))[:60] for name in ("net", "num_classes"))
    return f"{'an unknown net' if net == '?' else net}{width} ({shape}, {classes} classes)"


def load_weights(model: pl.LightningModule, path: str | Path) -> dict[str, Any]:
    """Load the weights of a checkpoint into a model, and return the checkpoint. Raise Failure if they are of another net."""
    checkpoint = read_checkpoint(Path(path).expanduser())
    try:
        model.load_state_dict(checkpoint["state_dict"])
    except RuntimeError:
        raise Failure(
            f"{path} holds weights of {describe_net(checkpoint.get('hyper_parameters', {}))}, "
            f"not of {describe_net(model.hparams)}: leave --net and the data flags out, or give those of the checkpoint"
        ) from None
    return checkpoint
